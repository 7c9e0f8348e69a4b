//! `attach` of `ucm_tests::fuzz_targets`, under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ucm_tests::fuzz_targets::segment::attach(data));
