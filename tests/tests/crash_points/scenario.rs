//! The ways through the protocol, and which of them pass which point.

use ucm_core::crash::Point;

/// All of them.
pub const SCENARIOS: &[Scenario] = {
    use Scenario::*;
    &[
        Comings,
        Succeeding,
        Hitting,
        Missing,
        Preparing,
        TakingOver,
        Aborting,
        Aborted,
        MeetingPins,
        Withdrawing,
        Crowding,
        Publishing,
        Failing,
        Waiting,
        Reaping,
    ]
};

/// A way through the protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scenario {
    /// Joins and leaves, twice, with a pin and an unfinished load in hand.
    Comings,
    /// Joins in the place of a dead predecessor that left a lot.
    Succeeding,
    /// Gets what is there, several times.
    Hitting,
    /// Loads many keys into a full cache.
    Missing,
    /// Prepares slots in a full cache.
    Preparing,
    /// Takes over a failed load, then a prepared slot.
    TakingOver,
    /// Meets the insertion of somebody who stands still.
    Aborting,
    /// Stands still in an insertion until somebody else aborts it.
    Aborted,
    /// Tags a slot that is pinned in the meantime.
    MeetingPins,
    /// Inserts a key that somebody else inserts faster.
    Withdrawing,
    /// Loads keys whose two buckets are full.
    Crowding,
    /// Publishes to somebody who sleeps.
    Publishing,
    /// Fails a load before somebody who sleeps.
    Failing,
    /// Waits for a load that takes a while.
    Waiting,
    /// Reaps two who died with everything in hand.
    Reaping,
}

/// Which scenarios reach a point, and at which passings the victim dies there.
/// Every point is here, or this does not compile.
pub fn plan(point: Point) -> &'static [(Scenario, u64)] {
    use Point as P;
    use Scenario::*;
    match point {
        P::JoinLocked | P::JoinAdmitted | P::JoinOccupied => {
            &[(Comings, 1), (Comings, 2), (Succeeding, 1)]
        }
        P::LeaveRepaired => &[(Comings, 1), (Comings, 2)],
        P::GetFound | P::GetPinned | P::GetHit => &[(Hitting, 1), (Hitting, 3)],
        P::ReleaseStart | P::ReleaseDone => &[(Hitting, 1), (Hitting, 3), (Missing, 5)],
        P::GetTookOver => &[(TakingOver, 1), (TakingOver, 2)],
        P::GetAborting => &[(Aborting, 1), (Aborting, 2)],
        P::EvictPinned => &[(MeetingPins, 1), (MeetingPins, 2)],
        P::EvictChosen | P::EvictTagged | P::EvictCommitting | P::EvictCommitted => {
            &[(Missing, 1), (Missing, 7), (Preparing, 1)]
        }
        P::InsertUnlisted => &[(Missing, 1), (Missing, 7)],
        P::InsertKeyed
        | P::InsertPinned
        | P::InsertAnnounced
        | P::InsertPublished
        | P::InsertScanned
        | P::InsertDone => &[(Missing, 1), (Missing, 7), (Preparing, 1), (Preparing, 2)],
        P::WithdrawClaimed | P::WithdrawUnlisted => {
            &[(Withdrawing, 1), (Withdrawing, 2), (Aborted, 1)]
        }
        P::ReplaceCommitted | P::ReplaceSwapped => &[(Crowding, 1), (Crowding, 2)],
        P::PublishStart | P::PublishUnwoken => {
            &[(Publishing, 1), (Publishing, 2), (Missing, 5), (Failing, 1)]
        }
        P::PublishErrorStored => &[(Failing, 1), (Failing, 2)],
        P::WaitArmed | P::WaitOver => &[(Waiting, 1), (Waiting, 3)],
        P::ReapStart | P::ReapRepaired | P::ReapVacated => &[(Reaping, 1), (Reaping, 2)],
        P::ReapUnlisted | P::ReapSlot | P::ReapPins => {
            &[(Reaping, 1), (Reaping, 3), (Succeeding, 1), (Succeeding, 2)]
        }
    }
}
