//! `cargo xtask tidy`: the house rules that a compiler does not check.
//!
//! - A source file begins with `//!`, its one job.
//! - It is no longer than [`MAX_LINES`].
//! - Nothing is left to do: no `TODO`, `FIXME`, `todo!`, `unimplemented!`.
//! - An ordering names its counterpart: each tag in `SYNC(tag)` stands in at
//!   least two places.
//! - The text of every mutant is where the list of mutants says.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// One concept fits.
const MAX_LINES: usize = 560;

/// Checks every Rust file; true when nothing was found.
pub fn run() -> io::Result<bool> {
    let root = crate::workspace_root()?;
    let mut files = Vec::new();
    for folder in ["ucm-core", "ucm-posix", "ucm-cuda", "ucm-rocm", "ucm-loader", "xtask", "tests"]
    {
        collect(&root.join(folder), &mut files)?;
    }
    let mut findings = Vec::new();
    let mut tags: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for path in &files {
        let text = fs::read_to_string(path)?;
        let name = path.strip_prefix(&root).unwrap_or(path).display().to_string();
        check_file(&name, &text, &mut findings);
        for tag in text.split("SYNC(").skip(1).filter_map(|rest| rest.split_once(')')) {
            // This file speaks of tags without having one.
            if !name.starts_with("xtask") {
                tags.entry(tag.0.to_owned()).or_default().push(name.clone());
            }
        }
    }
    for (tag, places) in &tags {
        if let [only] = places.as_slice() {
            findings.push(format!("{only}: SYNC({tag}) has no counterpart"));
        }
    }
    crate::mutants::check_list(|finding| findings.push(finding))?;
    findings.iter().for_each(|finding| println!("{finding}"));
    println!("{} files, {} orderings named, {} findings", files.len(), tags.len(), findings.len());
    Ok(findings.is_empty())
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            if entry.file_name() != "target" {
                collect(&path, files)?;
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files.sort();
    Ok(())
}

fn check_file(name: &str, text: &str, findings: &mut Vec<String>) {
    if !text.starts_with("//!") {
        findings.push(format!("{name}: does not begin with its one job (`//!`)"));
    }
    let lines = text.lines().count();
    if lines > MAX_LINES {
        findings.push(format!("{name}: {lines} lines, more than {MAX_LINES}: is it one concept?"));
    }
    if name.starts_with("xtask") {
        return;
    }
    for (number, line) in text.lines().enumerate() {
        if ["TODO", "FIXME", "todo!(", "unimplemented!("].iter().any(|word| line.contains(word)) {
            findings.push(format!("{name}:{}: something is left to do", number + 1));
        }
    }
}
