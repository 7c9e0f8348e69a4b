//! The mutants: one weakened ordering or one dropped step each, and who must notice.

/// A set of tests with its own build.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Suite {
    /// The model checker on the real core.
    Loom,
    /// The core's own tests.
    Core,
    /// Interleavings of the core set up by hand.
    Directed,
    /// Segments that turn out wrong while in use.
    Health,
    /// A segment's life: made, refused, replaced, removed.
    Segment,
    /// Real processes, killed and stopped at random.
    Processes,
    /// Real processes, killed and stopped at named points.
    Crash,
}

impl Suite {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Loom,
        Self::Core,
        Self::Directed,
        Self::Health,
        Self::Segment,
        Self::Processes,
        Self::Crash,
    ];

    /// What `cargo test` is told.
    pub fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Loom => &["--package", "ucm-core", "--release", "--test", "loom"],
            Self::Core => &["--package", "ucm-core", "--test", "cache"],
            Self::Directed => &["--package", "ucm-core", "--test", "directed"],
            Self::Health => &["--package", "ucm-core", "--test", "health"],
            Self::Segment => &["--package", "ucm-posix", "--test", "segment"],
            Self::Processes => &["--package", "ucm-tests", "--test", "multi_process"],
            Self::Crash => &["--package", "ucm-tests", "--test", "crash_points"],
        }
    }

    /// Its `RUSTFLAGS`.
    pub fn rustflags(self) -> &'static str {
        match self {
            Self::Loom => "--cfg ucm_loom",
            Self::Core | Self::Health | Self::Segment | Self::Processes => "",
            Self::Directed | Self::Crash => "--cfg ucm_crash",
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

const fn directed(
    name: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
) -> Mutant {
    Mutant { name, file, from, to, suite: Suite::Directed, test: None }
}

const fn processes(
    name: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
    test: &'static str,
) -> Mutant {
    Mutant { name, file, from, to, suite: Suite::Processes, test: Some(test) }
}

const fn crash(
    name: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
    test: &'static str,
) -> Mutant {
    Mutant { name, file, from, to, suite: Suite::Crash, test: Some(test) }
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
        "ucm-core/src/cache/wait.rs",
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
        "ucm-core/src/cache/wait.rs",
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
    directed(
        "tag taken off in the same generation",
        "ucm-core/src/slot/word.rs",
        "Self::make(self.status(), 0, self.generation().next())",
        "Self::make(self.status(), 0, self.generation())",
    ),
    directed(
        "a late publish is accepted",
        "ucm-core/src/cache/publish.rs",
        "if !mine {",
        "if !mine && word.status() != Status::Quarantined {",
    ),
    directed(
        "readers wait for a stopped inserter for ever",
        "ucm-core/src/cache/lookup.rs",
        "        self.abort_insertion(slot, word);\n    }\n\n    /// INSERTING",
        "    }\n\n    /// INSERTING",
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
    processes(
        "no timed wait: a waiter sleeps until it is woken",
        "ucm-core/src/cache/wait.rs",
        "self.host.wait(word, expected, WAIT_SLICE_NS.min(deadline_ns - now_ns));",
        "self.host.wait(word, expected, deadline_ns - now_ns);",
        "the_waiters_of_a_killed_owner_finish_and_exactly_one_of_them_loads_it",
    ),
    processes(
        "a waiter does not ask whether the owner lives",
        "ucm-core/src/cache/wait.rs",
        "                self.look_after_owner(&pending);",
        "",
        "the_waiters_of_a_killed_owner_finish_and_exactly_one_of_them_loads_it",
    ),
    processes(
        "a private futex",
        "ucm-posix/src/futex/linux.rs",
        "            libc::FUTEX_WAIT,\n",
        "            libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,\n",
        "a_publication_wakes_a_process_that_sleeps_without_a_timeout",
    ),
    processes(
        "quarantine that is over at once",
        "ucm-core/src/cache/reap.rs",
        "meta.set_quarantine_until_ns(self.host.now_ns().saturating_add(quarantine_ns));",
        "meta.set_quarantine_until_ns(0 * quarantine_ns);",
        "what_is_still_written_for_a_dead_owner_reaches_nobody_elses_bytes",
    ),
    processes(
        "no quarantine, and bytes of the dead in the slots of the living",
        "ucm-core/src/cache/reap.rs",
        "(word.released(Status::Quarantined), Counter::Quarantined)",
        "(word.released(Status::Free), Counter::Quarantined)",
        "what_is_still_written_for_a_dead_owner_reaches_nobody_elses_bytes",
    ),
    crash(
        "vacate before repair",
        "ucm-core/src/cache/reap.rs",
        "        self.repair(participant);\n        crash_point!(ReapRepaired);\n        entry.vacate();\n",
        "        entry.vacate();\n        self.repair(participant);\n        crash_point!(ReapRepaired);\n",
        "what_a_reaper_that_dies_leaves_undone_the_next_one_does",
    ),
    crash(
        "repair drops the pins before the slots",
        "ucm-core/src/cache/reap.rs",
        "        for slot in 0..slot_count {\n            // Most slots",
        "        self.plane.pins.clear_row(dead, slot_count);\n        for slot in 0..slot_count {\n            // Most slots",
        "slots_are_repaired_before_pins_and_pins_before_the_entry_goes",
    ),
    crash(
        "a dead one's insertion leaves its entry in the index",
        "ucm-core/src/cache/reap.rs",
        "                    self.plane.index.remove(meta.key().hash(), slot);\n                    (word.released(Status::Free), Counter::ReapedClaims)",
        "                    (word.released(Status::Free), Counter::ReapedClaims)",
        "what_a_reaper_that_dies_leaves_undone_the_next_one_does",
    ),
    crash(
        "the page that a dead evictor had tagged is freed",
        "ucm-core/src/cache/reap.rs",
        "(word.untagged(), Counter::ReapedClaims)",
        "(word.released(Status::Free), Counter::ReapedClaims)",
        "the_page_that_a_dead_evictor_had_tagged_stays_in_the_cache",
    ),
    crash(
        "pin check before the claim only",
        "ucm-core/src/cache/evict.rs",
        "if self.plane.pins.any(slot) {\n            crash_point!(EvictPinned);",
        "if false {\n            crash_point!(EvictPinned);",
        "a_slot_that_is_pinned_after_it_was_chosen_keeps_its_key_and_its_bytes",
    ),
    crash(
        "FREE slots are taken whatever pins lie on them",
        "ucm-core/src/cache/evict.rs",
        "        if self.plane.pins.any(slot) {\n            return None;\n        }\n        crash_point!(EvictChosen);",
        "        crash_point!(EvictChosen);\n        if before.status() == Status::Free {\n            meta.exchange(before, before.claimed(self.me));\n            return Some(Tagged { slot, before });\n        }",
        "a_slot_that_is_freed_for_a_dead_claimer_under_a_late_pin_is_taken_only_after_the_pin",
    ),
    crash(
        "nobody aborts an insertion that stands still",
        "ucm-core/src/cache/lookup.rs",
        "if self.meta(slot).exchange(word, word.moved(Status::Claimed)) {",
        "if false {",
        "whoever_stands_still_while_inserting_or_evicting_holds_nobody_up",
    ),
    crash(
        "a late publication overwrites its successor's checksum",
        "ucm-core/src/cache/publish.rs",
        "        self.check_mine(&loading)?;\n        self.meta(slot).set_payload(length_bytes, checksum);",
        "        self.meta(slot).set_payload(length_bytes, checksum);",
        "whoever_is_reaped_alive_has_its_publications_refused_and_unpins_nothing_of_its_successor",
    ),
    crash(
        "a late failure unpins what its successor holds",
        "ucm-core/src/cache/publish.rs",
        "        self.check_mine(&loading)?;\n        self.meta(slot).set_error(loading.generation, code);\n        crash_point!(PublishErrorStored);\n        self.finish(loading, Status::Failed)?;",
        "        self.meta(slot).set_error(loading.generation, code);\n        crash_point!(PublishErrorStored);\n        let _ = self.finish(loading, Status::Failed);",
        "whoever_is_reaped_alive_has_its_publications_refused_and_unpins_nothing_of_its_successor",
    ),
    crash(
        "inserters do not look for twins, across processes",
        "ucm-core/src/cache/insert.rs",
        "if self.meets_twin(key, hash, slot) {",
        "if false && self.meets_twin(key, hash, slot) {",
        "whoever_inserts_a_key_slower_than_another_waits_for_that_one",
    ),
    loom(
        "channel: tail published with Relaxed",
        "ucm-core/src/channel/producer.rs",
        "self.ring.lines.tail.store(self.tail, Ordering::Release);",
        "self.ring.lines.tail.store(self.tail, Ordering::Relaxed);",
    ),
    loom(
        "channel: head given back with Relaxed",
        "ucm-core/src/channel/consumer.rs",
        "self.ring.lines.head.store(self.head, Ordering::Release);",
        "self.ring.lines.head.store(self.head, Ordering::Relaxed);",
    ),
    loom(
        "channel: tail read with Relaxed",
        "ucm-core/src/channel/consumer.rs",
        "let found = self.ring.lines.tail.load(Ordering::Acquire);",
        "let found = self.ring.lines.tail.load(Ordering::Relaxed);",
    ),
    loom(
        "channel: no fence between the sleep word and the index",
        "ucm-core/src/channel/sleep.rs",
        "host.heavy_fence();",
        "",
    ),
    loom(
        "channel: no fence between the index and the sleep word",
        "ucm-core/src/channel/sleep.rs",
        "Self::Fenced => fence(Ordering::SeqCst),",
        "Self::Fenced => {}",
    ),
    loom(
        "channel: a sleeper does not look again",
        "ucm-core/src/channel/sleep.rs",
        "if !ready() {",
        "let _ = ready;\n    {",
    ),
    loom(
        "channel: a status moved without looking who sleeps",
        "ucm-core/src/channel/status.rs",
        "seqcst_order(); // channel.sleepers: I moved, now I look who sleeps",
        "",
    ),
    loom(
        "channel: a status read with Relaxed",
        "ucm-core/src/channel/status.rs",
        "Status::from_code(self.header.status.load(Ordering::Acquire))",
        "Status::from_code(self.header.status.load(Ordering::Relaxed))",
    ),
];
