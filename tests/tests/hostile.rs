//! What others do to a segment in use: scribble on it, delete it, change its version, restart everything.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use ucm_core::segment::header::ABI_VERSION;
use ucm_loader::rank::protocol::{Command, Outcome};
use ucm_posix::{Refusal, Segment, SegmentError, SegmentWatcher, gc};
use ucm_tests::process::{Heard, Process};
use ucm_tests::product::Product;
use ucm_tests::rank_process::RankProcess;
use ucm_tests::rng::Rng;
use ucm_tests::setup::Setup;
use ucm_tests::stage::{Stage, number_from_env};

const ACTOR: &str = env!("CARGO_BIN_EXE_actor");
const PROGRAM: &str = env!("CARGO_BIN_EXE_rank");

fn control(stage: &Stage) -> File {
    let options = stage.place().options().expect("options");
    let path = options.id.control_path(&options.dir);
    File::options().read(true).write(true).open(path).expect("the control file")
}

/// Every answer is one; nobody dies of what is in the segment.
fn answer(actor: &mut Process, line: &str) -> String {
    actor.say(line);
    match actor.hear_any() {
        Heard::Line(line) => line,
        other => panic!("{line}: {other:?}"),
    }
}

/// Where scribbles go: a few words anywhere, or much of one part.
fn scribble(control: &File, rng: &mut Rng, bytes: u64) {
    let lengths = [1, 4, 8, 64, 4096];
    let len = lengths[rng.below(lengths.len() as u64) as usize].min(bytes);
    let at = rng.below(bytes - len + 1);
    let noise: Vec<u8> = match rng.below(4) {
        0 => vec![0; len as usize],
        1 => vec![0xff; len as usize],
        _ => (0..len).map(|_| rng.number() as u8).collect(),
    };
    control.write_all_at(&noise, at).expect("a write");
}

#[test]
fn a_control_plane_that_is_scribbled_on_harms_no_process_that_uses_it() {
    let rounds = number_from_env("UCM_TEST_SCRIBBLES", 12);
    let mut rng = Rng::new(number_from_env("UCM_TEST_SEED", 1));
    let (mut poisoned, mut refused) = (0, 0);
    for round in 0..rounds {
        let stage = Stage::new(Setup { ranks: 4, quarantine_ms: 1, ..Setup::default() }, ACTOR);
        let mut actors: Vec<Process> = (0..3).map(|rank| stage.rank(rank)).collect();
        actors[0].expect("loads 0 40", "loaded");
        for (seed, actor) in actors.iter_mut().enumerate() {
            actor.say(&format!("blind {} 64 400", rng.number() >> 1 ^ seed as u64));
        }
        let (control, bytes) = (control(&stage), stage.segment().control_bytes() as u64);
        // Of some rounds only what lies behind the header.
        for _ in 0..1 + rng.below(60) {
            scribble(&control, &mut rng, bytes);
            std::thread::yield_now();
        }
        actors.iter_mut().for_each(|actor| {
            let heard = actor.hear_any();
            assert_eq!(heard, Heard::Line("blinded".to_string()), "round {round}");
        });
        // Somebody dies in the middle of that, somebody comes, somebody leaves.
        actors[2].kill();
        for line in ["reap", "blind 7 64 50"] {
            answer(&mut actors[0], line);
        }
        let mut newcomer = stage.start();
        let joined = answer(&mut newcomer, "join 3");
        refused += u32::from(joined != "joined");
        if joined == "joined" {
            answer(&mut newcomer, "blind 8 64 50");
        }
        poisoned += u32::from(stage.segment().plane().is_poisoned());
        for mut actor in actors.into_iter().take(2).chain([newcomer]) {
            answer(&mut actor, "leave");
            actor.finish();
        }
        stage.let_go();
    }
    eprintln!("{rounds} segments scribbled on: {poisoned} poisoned, {refused} joiners refused");
    assert!(poisoned > 0);
}

#[test]
fn a_poisoned_segment_is_an_error_for_those_in_it_and_a_new_one_for_those_who_come() {
    let stage = Stage::new(Setup { ranks: 4, ..Setup::default() }, ACTOR);
    let (mut old, mut asleep) = (stage.rank(0), stage.rank(1));
    old.expect("loads 0 8", "loaded 8");
    old.expect("get 20", "owner");
    asleep.say("load 20");
    stage.until_pins(2);
    // The magic number: whoever looks next sees it.
    control(&stage).write_all_at(&[0xee; 8], 0).expect("a write");
    old.expect("reap", "reaped");
    assert_eq!(old.ask("load 1"), "error Get(Poisoned)");
    assert_eq!(asleep.hear(), "error Wait(Poisoned)");
    let magic = ucm_core::segment::header::MAGIC.to_ne_bytes();
    control(&stage).write_all_at(&magic, 0).expect("a write");
    // It stays poisoned, whatever it looks like now; a new one takes its place.
    assert_eq!(old.ask("load 1"), "error Get(Poisoned)");
    let mut new = stage.rank(0);
    new.expect("loads 0 8", "loaded 8");
    old.expect("leave", "left");
    asleep.expect("leave", "left");
    new.expect("loads 0 8", "loaded 0");
    assert_eq!(stage.segment_files().len(), 2, "the new one's");
    // The owner's load was never published; that is not the tally's business here.
    for mut actor in [old, asleep, new] {
        answer(&mut actor, "leave");
        actor.finish();
    }
    stage.let_go();
    assert_eq!(stage.segment_files(), [""; 0]);
}

#[test]
fn a_segment_that_is_deleted_while_in_use_serves_those_who_have_it() {
    let stage = Stage::new(Setup::default(), ACTOR);
    let mut actors: Vec<Process> = (0..2).map(|rank| stage.rank(rank)).collect();
    actors[0].expect("loads 0 8", "loaded 8");
    for name in stage.segment_files() {
        std::fs::remove_file(stage.place().dir.join(name)).expect("removed");
    }
    actors[1].expect("loads 0 8", "loaded 0");
    actors[0].expect("hammer 1 64 200", "hammered");
    // Death in there is still seen and repaired.
    actors[0].expect("get 200", "owner");
    actors[1].say("load 200");
    stage.until("the waiter", || ucm_core::cache::Audit::new(&stage.segment().plane()).pins() == 2);
    actors[0].kill();
    assert!(actors[1].hear().starts_with("owner"));
    // Whoever comes now cannot have the old one; the two never mix.
    let mut newcomer = stage.rank(0);
    newcomer.expect("load 3", "owner");
    actors[1].expect("load 3", "hit");
    for actor in [&mut actors[1], &mut newcomer] {
        actor.expect("leave", "left");
    }
    stage.assert_nothing_wrong();
    stage.let_go();
    assert_eq!(stage.segment_files(), [""; 0]);
}

#[test]
fn two_versions_side_by_side_refuse_each_other_and_disturb_nobody() {
    let stage = Stage::new(Setup::default(), ACTOR);
    let mut rank = stage.rank(0);
    rank.expect("loads 0 8", "loaded 8");
    let options = stage.place().options().expect("options");
    // What a newer build would have written, for as long as we look.
    control(&stage).write_all_at(&(ABI_VERSION + 1).to_ne_bytes(), 8).expect("a write");
    let says_both = |text: String| {
        assert!(text.contains(&format!("version {}", ABI_VERSION + 1)), "{text}");
        assert!(text.contains(&format!("build has {ABI_VERSION}")), "{text}");
    };
    match Segment::open_or_create(&options) {
        Err(error @ SegmentError::Refused { in_use: true, refusal: Refusal::Core(_), .. }) => {
            says_both(error.to_string());
        }
        other => panic!("{other:?}"),
    }
    let watched = SegmentWatcher::open(&options.dir, &options.id);
    says_both(watched.expect_err("refused").to_string());
    // A collector of another version finds it in use by its locks, and so it is kept.
    assert!(gc::collect(&options.dir, true).expect("a collection").removed.is_empty());
    control(&stage).write_all_at(&ABI_VERSION.to_ne_bytes(), 8).expect("a write");
    rank.expect("loads 0 8", "loaded 0");
    rank.expect("leave", "left");
    rank.finish();
    stage.finish();
}

fn served(rank: &mut RankProcess, blocks: &[u64]) -> (u64, u64) {
    match rank.ask(Command::Serve { blocks: blocks.to_vec(), at: 0 }) {
        Ok(Outcome::Done(done)) => {
            assert_eq!((done.failed_shards, done.mismatched_shards), (0, 0), "{:?}", done.reasons);
            (done.hits, done.owned)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_persistent_cache_outlives_every_rank_and_starts_the_next_ones_warm() {
    let mut product = Product::new(PathBuf::from(PROGRAM), 2, 64, 3).expect("places");
    product.setup.config.persist = true;
    let blocks: Vec<u64> = (1..9).collect();
    let mut first = product.rank(0, None).expect("a rank");
    let dumped = first.ask(Command::Dump { blocks: blocks.clone(), at: 0 });
    assert!(matches!(dumped, Ok(Outcome::Done(_))), "{dumped:?}");
    assert!(first.leave().is_ok());
    // Nobody is there. Half of the next ones are killed, half leave.
    for round in 0..6 {
        assert_eq!(product.shm_names().len(), 2, "round {round}");
        let mut ranks: Vec<RankProcess> =
            (0..2).map(|rank| product.rank(rank, None).expect("a rank")).collect();
        for rank in &mut ranks {
            let (hits, owned) = served(rank, &blocks);
            assert_eq!((hits, owned), (32, 0), "round {round}: nothing is read again");
        }
        for mut rank in ranks {
            if round % 2 == 0 {
                rank.kill();
            } else {
                assert!(rank.leave().is_ok());
            }
        }
    }
    assert_eq!(product.audit(&blocks), [""; 0]);
    assert!(gc::collect(&product.shm_dir(), false).expect("a collection").removed.is_empty());
    assert_eq!(gc::collect(&product.shm_dir(), true).expect("a collection").removed.len(), 1);
    assert_eq!(product.shm_names(), [""; 0]);
}
