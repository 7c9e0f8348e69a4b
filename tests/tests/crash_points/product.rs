//! Every point outside the core: in a segment's life, in the pipelines, in the file backend.
//!
//! The one who dies is a rank of the product. Then others take over what it
//! did, and everything it could have left is looked at: segment, slots, store,
//! and the shared-memory directory.

use std::path::PathBuf;

use ucm_loader::crash::Point as LoaderPoint;
use ucm_loader::rank::protocol::{Command, Outcome};
use ucm_posix::crash::Point as SegmentPoint;
use ucm_posix::gc;
use ucm_tests::product::Product;
use ucm_tests::rank_process::{End, RankProcess, Silence};

const PROGRAM: &str = env!("CARGO_BIN_EXE_rank");
const DEAD: Silence = Silence::Dead(End::Killed);
/// Blocks that are in the store before anybody dies.
const STORED: [u64; 6] = [1, 2, 3, 4, 5, 6];
/// Blocks that the victim dumps.
const FRESH: [u64; 3] = [11, 12, 13];

fn product() -> Product {
    Product::new(PathBuf::from(PROGRAM), 3, 128, 7).expect("places")
}

fn done(outcome: Result<Outcome, Silence>) {
    match outcome {
        Ok(Outcome::Done(done)) => {
            assert_eq!((done.failed_shards, done.mismatched_shards), (0, 0), "{:?}", done.reasons);
        }
        other => panic!("{other:?}"),
    }
}

fn dump(rank: &mut RankProcess, blocks: &[u64]) -> Result<Outcome, Silence> {
    rank.ask(Command::Dump { blocks: blocks.to_vec(), at: 128 })
}

fn serve(rank: &mut RankProcess, blocks: &[u64]) -> Result<Outcome, Silence> {
    rank.ask(Command::Serve { blocks: blocks.to_vec(), at: 0 })
}

fn leave(rank: RankProcess) {
    let left = rank.leave();
    assert!(matches!(left, Ok(Outcome::Stopped { drained: true })), "{left:?}");
}

/// The store is filled, and the cache is empty again: the segment is gone.
fn fill_the_store(product: &Product) {
    let mut first = product.rank(0, None).expect("a rank");
    done(dump(&mut first, &STORED));
    leave(first);
    assert_eq!(product.shm_names(), [""; 0]);
}

/// Whoever comes now, also in the place of the dead, finds everything; the
/// last one out leaves nothing but what `gc` takes for an orphan.
fn others_go_on(product: &Product, others: Vec<RankProcess>, what: &str) {
    let began = others.len() as u32;
    let mut ranks = others;
    // Those that are there already have the numbers from 1 on.
    let newcomers = (0..3).filter(|&rank| rank == 0 || rank > began);
    ranks.extend(newcomers.map(|rank| product.rank(rank, None).expect("a rank")));
    for rank in &mut ranks {
        done(serve(rank, &STORED));
        done(dump(rank, &FRESH));
        done(serve(rank, &FRESH));
    }
    // Held open, so that what they leave can be looked at.
    let held = product.segment().expect("the segment");
    ranks.into_iter().for_each(leave);
    let stored: Vec<u64> = STORED.into_iter().chain(FRESH).collect();
    assert_eq!(product.audit(&stored), [""; 0], "{what}");
    drop(held);
    let collected = gc::collect(&product.shm_dir(), false).expect("a collection");
    assert!(collected.failed.is_empty(), "{what}: {:?}", collected.failed);
    assert_eq!(product.shm_names(), [""; 0], "{what}");
}

fn at(name: &str, nth: u32) -> String {
    format!("{name}:{nth}")
}

#[test]
fn a_segment_whose_maker_or_guest_dies_at_any_point_serves_the_others() {
    use SegmentPoint as P;
    for &point in P::ALL {
        let product = product();
        fill_the_store(&product);
        let crash = at(point.name(), 1);
        let others = match point {
            P::CreateBirth
            | P::CreateDrafted
            | P::CreateReserved
            | P::CreateInitialised
            | P::CreateDataLinked
            | P::CreateControlLinked => {
                assert_eq!(product.rank(0, Some(&crash)).err(), Some(DEAD), "{point:?}");
                Vec::new()
            }
            P::AttachOpened | P::AttachLocked | P::AttachPresent | P::AttachChecked => {
                let other = product.rank(1, None).expect("a rank");
                assert_eq!(product.rank(0, Some(&crash)).err(), Some(DEAD), "{point:?}");
                vec![other]
            }
            P::LeaveLocked | P::LeaveAbsent => {
                let other = product.rank(1, None).expect("a rank");
                let victim = product.rank(0, Some(&crash)).expect("a rank");
                assert_eq!(victim.leave().err(), Some(DEAD), "{point:?}");
                vec![other]
            }
            P::LeaveLast | P::RemoveControlUnlinked | P::RemoveDone => {
                let victim = product.rank(0, Some(&crash)).expect("a rank");
                assert_eq!(victim.leave().err(), Some(DEAD), "{point:?}");
                Vec::new()
            }
        };
        others_go_on(&product, others, point.name());
    }
    eprintln!("{} points in a segment's life, a death at each", P::ALL.len());
}

/// What the victim is asked for so that it passes the point.
fn errand(point: LoaderPoint) -> (&'static [u64], &'static [u64]) {
    use LoaderPoint as P;
    match point {
        P::LoadClaimed | P::LoadSubmitted | P::LoadArrived | P::LoadPublished | P::LoadCopied => {
            (&STORED, &[])
        }
        P::DumpStaged
        | P::DumpPublished
        | P::DumpStored
        | P::FileMade
        | P::FileShardWritten
        | P::FileHeaderWritten
        | P::FileRenamed => (&[], &FRESH),
    }
}

#[test]
fn what_a_rank_that_dies_in_a_pipeline_had_in_hand_is_loaded_and_stored_by_the_others() {
    let mut deaths = 0;
    for &point in LoaderPoint::ALL {
        for nth in [1, 3] {
            let product = product();
            fill_the_store(&product);
            let mut other = product.rank(1, None).expect("a rank");
            let crash = at(point.name(), nth);
            let mut victim = product.rank(0, Some(&crash)).expect("a rank");
            let (load, fresh) = errand(point);
            // The other one asks for the same at the same time.
            if load.is_empty() {
                assert_eq!(dump(&mut victim, fresh).err(), Some(DEAD), "{crash}");
                done(dump(&mut other, fresh));
            } else {
                victim.tell(Command::Serve { blocks: load.to_vec(), at: 0 });
                let served = serve(&mut other, load);
                let mut heard = victim.hear();
                // The other one may have loaded so much that the point was not passed.
                if heard.is_ok() {
                    leave(other);
                    leave(victim);
                    victim = product.rank(0, Some(&crash)).expect("a rank");
                    heard = serve(&mut victim, load);
                    other = product.rank(1, None).expect("a rank");
                    done(serve(&mut other, load));
                } else {
                    done(served);
                }
                assert_eq!(heard.err(), Some(DEAD), "{crash}");
            }
            deaths += 1;
            others_go_on(&product, vec![other], &crash);
        }
    }
    eprintln!("{} points in pipelines and files, {deaths} deaths", LoaderPoint::ALL.len());
}
