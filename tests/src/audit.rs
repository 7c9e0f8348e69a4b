//! What must be true when nobody is in the middle of something, and a picture for when it is not.

use std::fmt::Write;
use std::sync::Arc;

use ucm_core::ControlPlane;
use ucm_core::cache::{Audit, Violation};
use ucm_core::host::Liveness;
use ucm_core::participant::Role;
use ucm_core::slot::word::Status;
use ucm_core::sync::Ordering;
use ucm_posix::{Attachment, OfdLiveness, Segment};

use crate::actor::rank::slot_words;
use crate::keys::{id_of, payload_word, payload_words};

/// Everything that is wrong now.
pub fn violations(segment: &Segment) -> Vec<Violation> {
    let plane = segment.plane();
    let liveness = OfdLiveness::new(Arc::clone(segment.lock_file()));
    let mut found = Vec::new();
    Audit::new(&plane).check(&liveness, |violation| found.push(violation));
    found
}

/// With everybody gone and the dead reaped: no violation, no pin, nothing in
/// the middle of something, every slot accounted for, and the right bytes.
///
/// # Panics
/// When something is not so.
pub fn assert_sound(segment: &Arc<Segment>) {
    let scout = Attachment::join(Arc::clone(segment), Role::Scout, None, None);
    let scout = scout.expect("a place for the auditor");
    scout.cache().reap_dead();
    let picture = || picture(segment);
    let plane = segment.plane();
    assert_eq!(violations(segment), [], "{}", picture());
    let audit = Audit::new(&plane);
    assert_eq!(audit.pins(), 0, "pins leaked\n{}", picture());
    let census = audit.census();
    assert_eq!(census.total(), plane.geometry().shape.slot_count, "{}", picture());
    let busy = census.claimed + census.inserting + census.loading + census.tagged;
    assert_eq!(busy, 0, "somebody's work was left\n{}", picture());
    assert_eq!(plane.attached_ranks(), 0, "somebody's place was left\n{}", picture());
    for slot in 0..census.total() {
        assert!(has_right_bytes(segment, &audit, slot), "slot {slot}\n{}", picture());
    }
}

/// Whether a READY slot holds what its key demands.
fn has_right_bytes(segment: &Segment, audit: &Audit<'_, '_>, slot: u32) -> bool {
    let Some((key, Status::Ready)) = audit.slot(slot) else { return true };
    let (Some(id), Some(words)) = (id_of(&key), slot_words(segment, slot)) else { return false };
    (0..payload_words(id)).all(|at| words[at].load(Ordering::Relaxed) == payload_word(id, at))
}

/// The segment's state, for people.
pub fn picture(segment: &Segment) -> String {
    let plane = segment.plane();
    let liveness = OfdLiveness::new(Arc::clone(segment.lock_file()));
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = draw(&plane, &liveness, &mut out);
    for violation in violations(segment) {
        let _ = writeln!(out, "  {violation:?}");
    }
    out
}

fn draw(
    plane: &ControlPlane<'_>,
    liveness: &OfdLiveness,
    out: &mut String,
) -> Result<(), std::fmt::Error> {
    let audit = Audit::new(plane);
    writeln!(out, "{:?}", audit.census())?;
    for slot in 0..plane.geometry().shape.slot_count {
        if let Some((key, status)) = audit.slot(slot) {
            writeln!(out, "  slot {slot}: {status:?}, key {:?}", id_of(&key))?;
        }
    }
    for (participant, view) in plane.participants() {
        let (held, pins) = (liveness.is_held(participant), audit.pins_of(participant));
        if view.live || held || pins != 0 {
            let (live, pid) = (view.live, view.pid);
            writeln!(
                out,
                "  participant {participant}: live {live}, alive {held}, pid {pid}, pins {pins}"
            )?;
        }
    }
    Ok(())
}
