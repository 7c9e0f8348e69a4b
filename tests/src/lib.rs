//! Harnesses for tests across processes.
