//! Every point: killed there, the others go on; stopped there, nobody is held up.

use nix::sys::signal::Signal;
use ucm_core::crash::Point;
use ucm_tests::process::Heard;
use ucm_tests::stage::number_from_env;

use crate::play::Play;
use crate::scenario::{SCENARIOS, Scenario, plan};

/// A victim dies at the `nth` passing of `point`, and the others go on.
/// `false`: it never came to that.
fn dies(scenario: Scenario, point: Point, nth: u64) -> bool {
    let mut play = Play::new(scenario);
    let dead = play.act(&format!("crash-at {} {nth} kill", point.name()));
    let heard = dead.then(|| play.victim.hear_any());
    if heard.is_none() {
        // At the end of its part, whatever it holds.
        play.victim.kill();
    }
    let by_signal = Heard::Died(Some(Signal::SIGKILL as i32));
    assert!(heard.is_none() || heard == Some(by_signal), "{scenario:?}, {point:?}: {heard:?}");
    play.go_on();
    dead
}

#[test]
fn whoever_dies_at_any_point_leaves_a_cache_that_the_others_go_on_with() {
    let (mut deaths, mut reached) = (0, 0);
    for &point in Point::ALL {
        for &(scenario, nth) in plan(point) {
            let dead = dies(scenario, point, nth);
            assert!(dead, "{point:?}, passing {nth}: never reached in {scenario:?}");
            deaths += 1;
        }
        reached += 1;
    }
    assert_eq!(reached, Point::ALL.len());
    eprintln!("{reached} of {} points, {deaths} deaths at them", Point::ALL.len());
}

/// The points that anybody passes in an undisturbed play of `scenario`: all
/// of the victim's are among them.
fn points_on_the_way(scenario: Scenario) -> Vec<Point> {
    let mut play = Play::new(scenario);
    let disturbed = play.act(&format!("crash-at {} {} kill", Point::GetFound.name(), u32::MAX));
    assert!(!disturbed, "{scenario:?} does not get to its end");
    let passed = |point: &Point| play.stage.board().passed(*point) > 0;
    let points = Point::ALL.iter().copied().filter(passed).collect();
    play.victim.kill();
    play.go_on();
    points
}

#[test]
fn death_at_every_point_of_every_scenario_is_survived() {
    let passings = number_from_env("UCM_TEST_PASSINGS", 1);
    let mut deaths = 0;
    for &scenario in SCENARIOS {
        for point in points_on_the_way(scenario) {
            // Once a passing is never reached, later ones are not either.
            deaths += (1..=passings).take_while(|&nth| dies(scenario, point, nth)).count();
        }
    }
    eprintln!("{} scenarios, {deaths} deaths", SCENARIOS.len());
    assert!(deaths >= SCENARIOS.len() * 5, "{deaths} deaths: the scenarios have lost their points");
}

/// Points of making room and inserting at which the victim is on its way to a key.
const STANDSTILLS: &[(Point, Scenario)] = &[
    (Point::EvictChosen, Scenario::Missing),
    (Point::EvictTagged, Scenario::Missing),
    (Point::EvictCommitting, Scenario::Missing),
    (Point::EvictCommitted, Scenario::Missing),
    (Point::InsertUnlisted, Scenario::Missing),
    (Point::InsertKeyed, Scenario::Missing),
    (Point::InsertPinned, Scenario::Missing),
    (Point::InsertAnnounced, Scenario::Missing),
    (Point::InsertPublished, Scenario::Missing),
    (Point::InsertScanned, Scenario::Missing),
    (Point::InsertKeyed, Scenario::Preparing),
    (Point::InsertAnnounced, Scenario::Preparing),
    (Point::InsertPublished, Scenario::Preparing),
    (Point::InsertScanned, Scenario::Preparing),
    (Point::WithdrawClaimed, Scenario::Withdrawing),
    (Point::WithdrawUnlisted, Scenario::Withdrawing),
    (Point::ReplaceCommitted, Scenario::Crowding),
    (Point::ReplaceSwapped, Scenario::Crowding),
];

#[test]
fn whoever_stands_still_while_inserting_or_evicting_holds_nobody_up() {
    for &(point, scenario) in STANDSTILLS {
        let mut play = Play::new(scenario);
        let stopped = play.act(&format!("crash-at {} 1 stop", point.name()));
        assert!(stopped, "{point:?}: never reached in {scenario:?}");
        // All keys, so also the one being inserted and the one being evicted;
        // a load here has no deadline before the watchdog's.
        for helper in &mut play.helpers {
            helper.expect("loads 0 64", "loaded");
            helper.expect("loads 100 120", "loaded");
            helper.expect("hammer 1 64 100", "hammered");
        }
        play.victim.resume();
        let line = play.victim.hear();
        assert!(!line.starts_with("error"), "{point:?}: {line}");
        play.victim.expect("loads 0 64", "loaded");
        play.victim.expect("leave", "left");
        play.go_on();
    }
    eprintln!("stood still at {} points", STANDSTILLS.len());
}
