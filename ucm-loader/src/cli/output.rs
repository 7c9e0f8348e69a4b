//! Tables for people, one JSON object for programs, and bars for the patient.

use std::time::Duration;

use comfy_table::{ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

/// Of tables that do not go to a terminal, in characters.
const WIDTH: u16 = 120;

/// A table with `header`.
pub fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    table.set_content_arrangement(ContentArrangement::Dynamic);
    if !table.is_tty() {
        // Where nobody knows the width: wide enough, and no wider.
        table.set_width(WIDTH);
    }
    table.set_header(header);
    table
}

/// Prints `report` as one JSON object, the last line of the output.
///
/// # Errors
/// When it cannot be put into JSON.
pub fn json(report: &impl Serialize) -> Result<(), serde_json::Error> {
    println!("{}", serde_json::to_string(report)?);
    Ok(())
}

/// A bar of `steps` steps on standard error; hidden where that is no terminal.
pub fn progress(steps: u64, what: &'static str) -> ProgressBar {
    let bar = ProgressBar::new(steps);
    let style = ProgressStyle::with_template("{msg:22} {wide_bar} {human_pos}/{human_len} {eta}");
    if let Ok(style) = style {
        bar.set_style(style);
    }
    bar.set_message(what);
    bar
}

/// A sign of life while something of unknown length goes on.
pub fn spinner(what: String) -> ProgressBar {
    let bar = ProgressBar::new_spinner().with_message(what);
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}

/// A byte count as people read it.
pub fn bytes(count: u64) -> String {
    indicatif::BinaryBytes(count).to_string()
}

/// Seconds, rounded to a tenth of a millisecond.
pub fn seconds(ns: u64) -> f64 {
    (ns as f64 / 1e5).round() / 1e4
}

/// Bytes per nanosecond, which are gigabytes per second, to three decimals.
pub fn gb_per_s(bytes: u64, ns: u64) -> f64 {
    if ns == 0 { 0.0 } else { (bytes as f64 / ns as f64 * 1e3).round() / 1e3 }
}
