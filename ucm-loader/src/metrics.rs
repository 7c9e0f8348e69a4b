//! What one engine counts. No globals: an engine owns its numbers.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! metrics {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// The counters of one engine.
        #[derive(Debug, Default)]
        pub struct Metrics { $($(#[$doc])* pub(crate) $name: AtomicU64),* }

        /// The counters at one moment.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
        pub struct MetricsSnapshot { $($(#[$doc])* pub $name: u64),* }

        impl Metrics {
            /// All of them now; each by itself, not all at one instant.
            pub fn snapshot(&self) -> MetricsSnapshot {
                MetricsSnapshot { $($name: self.$name.load(Ordering::Relaxed)),* }
            }
        }

        impl MetricsSnapshot {
            /// What was counted since `earlier`.
            pub fn since(&self, earlier: &Self) -> Self {
                Self { $($name: self.$name.saturating_sub(earlier.$name)),* }
            }
        }
    };
}

metrics! {
    /// Bytes copied from the host cache to the device.
    h2d_bytes,
    /// Bytes copied from the device to the host cache.
    d2h_bytes,
    /// Shards found READY.
    hits,
    /// Shards this engine loaded from the backend.
    owned,
    /// Shards another rank was loading.
    waits,
    /// Shards that failed.
    shard_failures,
    /// Shards handed to the backend to keep.
    stored,
    /// CPU time the transfer thread spent on waiting, in nanoseconds.
    wait_cpu_ns,
    /// Wall time the transfer thread spent on waiting, in nanoseconds.
    wait_wall_ns,
}

impl Metrics {
    pub(crate) fn add(&self, counter: impl FnOnce(&Self) -> &AtomicU64, n: u64) {
        counter(self).fetch_add(n, Ordering::Relaxed);
    }
}
