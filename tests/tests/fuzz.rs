//! The fuzz targets without a fuzzer: over the corpus, and over seeded random inputs.
//!
//! `UCM_TEST_FUZZ` says how many random inputs each target gets.

use std::path::Path;

use ucm_tests::fuzz_targets::TARGETS;
use ucm_tests::rng::Rng;
use ucm_tests::stage::number_from_env;

const INPUTS: u64 = 1500;

fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let mut inputs = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if let Ok(bytes) = std::fs::read(entry.path()) {
            inputs.push((entry.path().display().to_string(), bytes));
        }
    }
    inputs.sort();
    inputs
}

/// Says which input it was, however that one ends.
struct Witness<'a>(&'a str);

impl Drop for Witness<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the input was {}", self.0);
        }
    }
}

#[test]
fn no_input_of_the_corpus_makes_a_target_panic_or_hang() {
    for (name, target) in TARGETS {
        let inputs = corpus(name);
        assert!(!inputs.is_empty(), "no corpus for {name}");
        for (path, bytes) in &inputs {
            let _witness = Witness(path);
            target(bytes);
        }
    }
}

#[test]
fn no_random_input_makes_a_target_panic_or_hang() {
    let inputs = number_from_env("UCM_TEST_FUZZ", INPUTS);
    let seed = number_from_env("UCM_TEST_SEED", 1);
    for (number, (name, target)) in TARGETS.iter().enumerate() {
        let seeds = corpus(name);
        let mut rng = Rng::new(seed.wrapping_add(number as u64 * 1_000_003));
        for _ in 0..inputs {
            let mut bytes: Vec<u8> = match seeds.len() as u64 {
                count if count > 0 && rng.one_in(2) => seeds[rng.below(count) as usize].1.clone(),
                _ => (0..rng.below(400)).map(|_| rng.number() as u8).collect(),
            };
            for _ in 0..rng.below(6) {
                let at = rng.below(bytes.len() as u64 + 1) as usize;
                match bytes.get_mut(at) {
                    Some(byte) => *byte = rng.number() as u8,
                    None => bytes.push(rng.number() as u8),
                }
            }
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            let said = format!("{name}: {hex}");
            let _witness = Witness(&said);
            target(&bytes);
        }
    }
}
