//! Death, standstill and pause at every named point of the protocol: a run of its own.
//!
//! ```text
//! RUSTFLAGS="--cfg ucm_crash" cargo test -p ucm-tests --test crash_points
//! ```
//!
//! In any other build the points do not exist, and the one test here says so.

#[cfg(ucm_crash)]
mod directed;
#[cfg(ucm_crash)]
mod every_point;
#[cfg(ucm_crash)]
mod hammer;
#[cfg(ucm_crash)]
mod play;
#[cfg(ucm_crash)]
mod product;
#[cfg(ucm_crash)]
mod repair;
#[cfg(ucm_crash)]
mod scenario;

#[cfg(not(ucm_crash))]
#[test]
fn crash_points_are_a_separate_run_and_were_not_tested_in_this_one() {
    use std::io::Write;
    // Past the capture of the test harness: this must be seen.
    let _ = writeln!(
        std::io::stderr(),
        "NOT RUN HERE: death at each of the {} crash points; this build has none. To run it:\n    \
         RUSTFLAGS=\"--cfg ucm_crash\" cargo test -p ucm-tests --test crash_points",
        ucm_core::crash::Point::ALL.len()
            + ucm_posix::crash::Point::ALL.len()
            + ucm_loader::crash::Point::ALL.len()
    );
}
