//! The mutants: one weakened ordering or one dropped step each, and who must notice.

/// A set of tests with its own build.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Suite {
    /// The model checker on the real core.
    Loom,
    /// The core's own tests.
    Core,
}

impl Suite {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Loom, Self::Core];

    /// What `cargo test` is told.
    pub fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Loom => &["--package", "ucm-core", "--release", "--test", "loom"],
            Self::Core => &["--package", "ucm-core", "--test", "cache"],
        }
    }

    /// Its `RUSTFLAGS`.
    pub fn rustflags(self) -> &'static str {
        match self {
            Self::Loom => "--cfg ucm_loom",
            Self::Core => "",
        }
    }
}

/// One change.
pub struct Mutant {
    /// What it does, in a few words.
    pub name: &'static str,
    /// Where, from the workspace's root.
    pub file: &'static str,
    /// The text that goes; found exactly once.
    pub from: &'static str,
    /// What comes instead.
    pub to: &'static str,
    /// Who must notice.
    pub suite: Suite,
    /// Which test of it (all when `None`).
    pub test: Option<&'static str>,
}

const fn loom(
    name: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
) -> Mutant {
    Mutant { name, file, from, to, suite: Suite::Loom, test: None }
}

const fn core(
    name: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
) -> Mutant {
    Mutant { name, file, from, to, suite: Suite::Core, test: None }
}

/// All of them.
pub const MUTANTS: &[Mutant] = &[
    loom(
        "publish with Relaxed",
        "ucm-core/src/cache/publish.rs",
        "Ordering::Release,\n                Ordering::Relaxed,",
        "Ordering::Relaxed,\n                Ordering::Relaxed,",
    ),
    loom(
        "poll with Relaxed",
        "ucm-core/src/cache/lookup.rs",
        "let word = meta.load(Ordering::Acquire);\n        let same = word.generation() == pending.generation;",
        "let word = meta.load(Ordering::Relaxed);\n        let same = word.generation() == pending.generation;",
    ),
    loom(
        "reader's pin not ordered before its state load",
        "ucm-core/src/cache/lookup.rs",
        "seqcst_order(); // pin/state: I pinned, now I read the state",
        "",
    ),
    loom(
        "evictor's tag not ordered before its pin check",
        "ucm-core/src/cache/evict.rs",
        "seqcst_order(); // pin/state: I tagged, now I read the pins",
        "",
    ),
    loom(
        "pins not checked after the tag",
        "ucm-core/src/cache/evict.rs",
        "if self.plane.pins.any(slot) {\n            crash_point!(EvictPinned);",
        "if false {\n            crash_point!(EvictPinned);",
    ),
    loom(
        "reader leaves the tag on",
        "ucm-core/src/cache/lookup.rs",
        "if !meta.exchange(word, word.untagged()) {",
        "if false {",
    ),
    loom(
        "tag taken off in the same generation",
        "ucm-core/src/slot/word.rs",
        "Self::make(self.status(), 0, self.generation().next())",
        "Self::make(self.status(), 0, self.generation())",
    ),
    loom(
        "inserter does not look for twins",
        "ucm-core/src/cache/insert.rs",
        "if self.meets_twin(key, hash, slot) {",
        "if false && self.meets_twin(key, hash, slot) {",
    ),
    loom(
        "inserter's entry not ordered before its look for twins",
        "ucm-core/src/cache/insert.rs",
        "seqcst_order(); // twins: I published mine, now I look for yours",
        "",
    ),
    loom(
        "publisher does not wake",
        "ucm-core/src/cache/publish.rs",
        "if word.has_waiters() {",
        "if false {",
    ),
    loom(
        "waiter does not set the waiters bit",
        "ucm-core/src/cache/lookup.rs",
        "let armed = word.with_waiters();",
        "let armed = word;",
    ),
    loom(
        "error code stored after the state",
        "ucm-core/src/cache/publish.rs",
        "self.meta(slot).set_error(loading.generation, code);",
        "",
    ),
    loom(
        "a word read again instead of the one seen with the pin",
        "ucm-core/src/cache/lookup.rs",
        "                // it proves anything: a word read later may be another key's.\n",
        "                let word = meta.load(Ordering::SeqCst);\n                if word.status() != Status::Ready { unpin(); return Attempt::Again; }\n",
    ),
    loom(
        "ring publishes its tail with Relaxed",
        "ucm-core/src/ring/producer.rs",
        "self.ring.tail.0.store(self.tail, Ordering::Release);",
        "self.ring.tail.0.store(self.tail, Ordering::Relaxed);",
    ),
    loom(
        "ring frees its head with Relaxed",
        "ucm-core/src/ring/consumer.rs",
        "self.ring.head.0.store(self.head, Ordering::Release);",
        "self.ring.head.0.store(self.head, Ordering::Relaxed);",
    ),
    core(
        "the pins of the dead are not given back",
        "ucm-core/src/cache/reap.rs",
        "let pins = self.plane.pins.clear_row(dead, slot_count);",
        "let pins = 0;",
    ),
    core(
        "no quarantine for a dead loader's slot",
        "ucm-core/src/cache/reap.rs",
        "(word.released(Status::Quarantined), Counter::Quarantined)",
        "(word.released(Status::Free), Counter::Quarantined)",
    ),
    core(
        "FAILED is retried before its audience has seen the code",
        "ucm-core/src/cache/lookup.rs",
        "Status::Failed if !self.plane.pins.only_mine(self.me, slot) => {",
        "Status::Failed if false => {",
    ),
    core(
        "reload although others may be copying",
        "ucm-core/src/cache/lookup.rs",
        "let alone = self.plane.pins.only_mine(self.me, slot);",
        "let alone = true;",
    ),
    core(
        "pins overflow",
        "ucm-core/src/pin/table.rs",
        "if before >= MAX_PINS_PER_SLOT {",
        "if false {",
    ),
];
