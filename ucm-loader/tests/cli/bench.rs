//! `ucm bench`: the figures of both variants of one run.

use crate::common::Corner;
use crate::common::child::{good, refused, run};
use crate::machine::{alone, assert_clean, fraction, numbers, ucm_in};

/// On a machine that is busy with other things a measurement may show nothing;
/// it is made again a few times then.
const ATTEMPTS: u32 = 5;

#[test]
fn rotated_order_takes_a_quarter_of_natural_orders_steps_with_four_loads_in_flight() {
    let _without_others = alone();
    let corner = Corner::new();
    let arguments = ["bench", "order", "--ranks", "4", "--shards", "12", "--load-ms", "40"];
    let attempt = || {
        let report = good(&run(ucm_in(&corner, &arguments).arg("--json")));
        assert_eq!(numbers(&report, ["ranks", "shards", "load_ms"]), [4, 12, 40]);
        // One load at a time, whatever the machine does meanwhile.
        assert_eq!(numbers(&report, ["natural.steps", "natural.peak_in_flight"]), [12, 1]);
        for order in ["natural", "rotated"] {
            let counts = ["backend_loads", "duplicate_backend_loads", "failed_shards"];
            let counts = counts.map(|name| numbers(&report, [&format!("{order}.{name}")])[0]);
            assert_eq!(counts, [12, 0, 0], "{order}");
            let figures = ["wall_ms", "ideal_ms", "wall_over_ideal"];
            let [wall, ideal, ratio] =
                figures.map(|name| fraction(&report, &format!("{order}.{name}")));
            println!("{order}: {wall} ms of {ideal} ms, {ratio}");
        }
        println!("rotated is {} times as fast", fraction(&report, "speedup"));
        let waves = numbers(&report, ["rotated.steps", "rotated.peak_in_flight"]);
        waves == [3, 4] && report["rotated"]["loads_by_rank"] == serde_json::json!([3, 3, 3, 3])
    };
    assert!((0..ATTEMPTS).any(|_| attempt()), "never three steps with four loads in flight");
    assert_clean(&corner);
}

#[test]
fn ranks_that_look_ahead_load_each_shard_once_too() {
    let _without_others = alone();
    let corner = Corner::new();
    let arguments = ["bench", "order", "--ranks", "3", "--shards", "48", "--json", "--free"];
    let mut command = ucm_in(&corner, &arguments);
    let report = good(&run(command.args(["--load-ms", "5"])));
    for order in ["natural", "rotated"] {
        let loads = format!("{order}.backend_loads");
        assert_eq!(numbers(&report, [&loads]), [48]);
    }
    assert_clean(&corner);
}

#[test]
fn futex_waiters_use_less_processor_time_than_yielding_ones() {
    let _without_others = alone();
    let corner = Corner::new();
    let arguments = ["bench", "wait", "--ranks", "4", "--shards", "20", "--json"];
    let attempt = || {
        let report = good(&run(&mut ucm_in(&corner, &arguments)));
        assert_eq!(numbers(&report, ["ranks", "shards"]), [4, 20]);
        assert_eq!(numbers(&report, ["yield_spin.failed_shards", "futex.failed_shards"]), [0, 0]);
        let cpu = ["yield_spin.waiter_cpu_s", "futex.waiter_cpu_s"];
        let [spinning, sleeping] = cpu.map(|name| fraction(&report, name));
        let ratio = fraction(&report, "cpu_ratio");
        println!("waiter CPU: yield-spin {spinning} s, futex {sleeping} s, ratio {ratio}");
        sleeping < spinning
    };
    assert!((0..ATTEMPTS).any(|_| attempt()), "sleeping never costs less than spinning");
    assert_clean(&corner);
}

#[test]
fn a_bench_without_a_name_is_refused_with_the_names_there_are() {
    let output = run(&mut crate::common::child::ucm(&["bench"]));
    refused(&output, 2, &["order", "wait"]);
}
