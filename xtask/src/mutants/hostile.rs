//! More mutants: what notices a segment that turns out wrong, and what the dead leave in a store.

use super::list::{Mutant, Suite};

const fn health(
    name: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
) -> Mutant {
    Mutant { name, file, from, to, suite: Suite::Health, test: None }
}

const fn segment(
    name: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
    test: &'static str,
) -> Mutant {
    Mutant { name, file, from, to, suite: Suite::Segment, test: Some(test) }
}

/// All of them.
pub const MUTANTS: &[Mutant] = &[
    health(
        "nobody looks whether the header is what it was",
        "ucm-core/src/segment/health.rs",
        "self.plane.is_header_intact() && self.plane.pins.is_admitted(self.me);",
        "self.plane.pins.is_admitted(self.me);",
    ),
    health(
        "evictors may overlook a participant's pins",
        "ucm-core/src/segment/health.rs",
        "self.plane.is_header_intact() && self.plane.pins.is_admitted(self.me);",
        "self.plane.is_header_intact();",
    ),
    health(
        "an index entry may name a slot that does not exist",
        "ucm-core/src/segment/health.rs",
        "            || self.index.has_stray_entry(cut(self.index.bucket_count()));",
        "            || false;",
    ),
    health(
        "a slot may be in a state that no move leads to",
        "ucm-core/src/segment/health.rs",
        "            || cut(self.slots.len()).any(impossible)\n",
        "            || cut(0).any(impossible)\n",
    ),
    health(
        "a poisoned segment goes on serving hits",
        "ucm-core/src/cache/lookup.rs",
        "        if self.plane.is_poisoned() {\n            return Err(GetError::Poisoned);\n        }\n        let hash",
        "        let hash",
    ),
    health(
        "a pin given back that was not there is counted below zero",
        "ucm-core/src/pin/table.rs",
        "        if before == 0 {\n            self.take_back(me, slot);",
        "        if false {\n            self.take_back(me, slot);",
    ),
    health(
        "a reaper passes over impossible slots",
        "ucm-core/src/cache/reap.rs",
        "if !cfg!(ucm_loom) && !word.is_possible(participants) {",
        "if false {",
    ),
    segment(
        "a poisoned segment is in the way while somebody still has it",
        "ucm-posix/src/segment/join.rs",
        "let in_the_way = in_use && !matches!(refusal, Refusal::Poisoned);",
        "let in_the_way = in_use;",
        "a_poisoned_segment_is_replaced_by_a_new_one_while_others_still_have_it",
    ),
    segment(
        "whoever leaves believes what the header says by then",
        "ucm-core/src/segment/attach.rs",
        "        self.fixed.nonce\n",
        "        self.header.nonce.load(Ordering::Relaxed)\n",
        "a_header_that_is_overwritten_while_in_use_does_not_mislead_whoever_leaves",
    ),
    Mutant {
        name: "nobody sweeps what dead writers left in a store",
        file: "ucm-loader/src/backend/file/store.rs",
        from: "        store.sweep();\n",
        to: "",
        suite: Suite::Crash,
        test: Some("what_a_rank_that_dies_in_a_pipeline_had_in_hand"),
    },
];
