//! Becoming owner, and what follows: the backend's bytes into the slot, then READY.

use std::sync::Arc;

use ucm_core::Loading;
use ucm_core::cache::Pending;
use ucm_core::key::ShardKey;
use ucm_core::slot::meta::LoadErrorCode;

use crate::backend::recorder::EventKind;
use crate::backend::traits::{LoadRequest, RawBuf};
use crate::crash::crash_point;
use crate::engine::Shared;
use crate::task::ShardError;

/// Loads that are claimed and not yet with the backend: handed over together,
/// so that a submission's cost is shared, and never held over a wait.
pub(crate) struct Batch {
    shared: Arc<Shared>,
    requests: Vec<LoadRequest>,
}

/// A batch is handed over when it is this long.
const BATCH: usize = 8;

impl Batch {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, requests: Vec::with_capacity(BATCH) }
    }

    /// Queues the load of `key` into the slot this rank has just claimed, and
    /// returns a place in its audience.
    pub(crate) fn load(&mut self, key: ShardKey, loading: Loading) -> Result<Pending, ShardError> {
        crash_point!(LoadClaimed);
        let shared = &self.shared;
        let cache = shared.attachment.cache();
        let pending = match cache.follow(&loading) {
            Ok(pending) => pending,
            Err(error) => {
                shared.abandon(loading);
                return Err(error.into());
            }
        };
        let Some(slot) = shared.slot_ptr(loading.slot()) else {
            // A slot the data plane does not have: the segment is not ours.
            cache.cancel(pending);
            shared.abandon(loading);
            return Err(ShardError::Load(LoadErrorCode::BAD_OBJECT));
        };
        // SAFETY: the slot is LOADING and this rank owns it, so nobody else
        // touches its bytes until the completion publishes or fails it; the
        // completion holds the attachment, and so the mapping.
        let buffer = unsafe { RawBuf::new(slot.as_ptr(), shared.shard_bytes()) };
        shared.budget.claim();
        let owner = Arc::clone(shared);
        self.requests.push(LoadRequest::new(key, buffer, move |result| {
            match result {
                Ok(shard) => {
                    crash_point!(LoadArrived);
                    owner.record(EventKind::Published, &key);
                    let length_bytes = u32::try_from(shard.len_bytes).unwrap_or(u32::MAX);
                    if let Some(pinned) =
                        owner.publish(loading, length_bytes, shard.checksum.unwrap_or(0))
                    {
                        crash_point!(LoadPublished);
                        owner.attachment.cache().release(pinned);
                    }
                }
                Err(error) => {
                    tracing::debug!(block = %key.block, shard = key.shard, %error, "load failed");
                    owner.fail(loading, error.code());
                }
            }
            owner.budget.claim_done();
        }));
        if self.requests.len() >= BATCH {
            self.submit();
        }
        Ok(pending)
    }

    /// Hands over what is queued.
    pub(crate) fn submit(&mut self) {
        if !self.requests.is_empty() {
            let requests = std::mem::replace(&mut self.requests, Vec::with_capacity(BATCH));
            self.shared.backend.submit(requests);
            crash_point!(LoadSubmitted);
        }
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.submit();
    }
}
