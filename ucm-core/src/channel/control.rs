//! The control block: what the engine asks for besides the prompt, as typed values.

use core::fmt;

use crate::describe::describe;
use crate::ptr::Shared;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// Words that no version uses yet: zero, and checked to be.
#[cfg(not(ucm_loom))]
const RESERVED_WORDS: usize = 238;
/// Models are small, and reach only what is the same.
#[cfg(ucm_loom)]
const RESERVED_WORDS: usize = 1;

/// The block in shared memory. The engine writes it while the status is its to
/// move (Idle, ReqData); the worker reads it once it was asked to do something.
#[repr(C, align(64))]
pub struct ControlBlock {
    pub(crate) model_id: [AtomicU64; 2],
    pub(crate) context_tokens: AtomicU32,
    pub(crate) token_limit: AtomicU32,
    pub(crate) lora_id: AtomicU64,
    pub(crate) lora_scale: AtomicU32,
    pub(crate) temperature: AtomicU32,
    pub(crate) top_p: AtomicU32,
    pub(crate) min_p: AtomicU32,
    pub(crate) top_k: AtomicU32,
    pub(crate) repetition_penalty: AtomicU32,
    pub(crate) presence_penalty: AtomicU32,
    pub(crate) frequency_penalty: AtomicU32,
    pub(crate) seed: AtomicU64,
    pub(crate) reserved: [AtomicU32; RESERVED_WORDS],
}

// SAFETY: atomics only.
unsafe impl Shared for ControlBlock {}

describe!(ControlBlock, size 1024, align 64, {
    0: model_id: [AtomicU64; 2],
    16: context_tokens: AtomicU32,
    20: token_limit: AtomicU32,
    24: lora_id: AtomicU64,
    32: lora_scale: AtomicU32,
    36: temperature: AtomicU32,
    40: top_p: AtomicU32,
    44: min_p: AtomicU32,
    48: top_k: AtomicU32,
    52: repetition_penalty: AtomicU32,
    56: presence_penalty: AtomicU32,
    60: frequency_penalty: AtomicU32,
    64: seed: AtomicU64,
    72: reserved: [AtomicU32; RESERVED_WORDS],
});

/// What the control block says.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Parameters {
    /// Names the model.
    pub model_id: [u64; 2],
    /// Tokens of context the model may see; 0 is the model's own.
    pub context_tokens: u32,
    /// Tokens it may produce; 0 is no limit.
    pub token_limit: u32,
    /// Names the LoRA adapter; 0 is none.
    pub lora_id: u64,
    /// How strongly it is applied, 0 to 16.
    pub lora_scale: f32,
    /// 0 is greedy; up to 100.
    pub temperature: f32,
    /// 0 (exclusive) to 1.
    pub top_p: f32,
    /// 0 to 1.
    pub min_p: f32,
    /// 0 is all.
    pub top_k: u32,
    /// Above 0, up to 10; 1 is none.
    pub repetition_penalty: f32,
    /// -2 to 2; 0 is none.
    pub presence_penalty: f32,
    /// -2 to 2; 0 is none.
    pub frequency_penalty: f32,
    /// Of the sampler.
    pub seed: u64,
}

impl Default for Parameters {
    fn default() -> Self {
        Self {
            model_id: [0; 2],
            context_tokens: 0,
            token_limit: 0,
            lora_id: 0,
            lora_scale: 0.0,
            temperature: 0.0,
            top_p: 1.0,
            min_p: 0.0,
            top_k: 0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
        }
    }
}

/// What is wrong in a control block.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum ControlError {
    /// A word that must be zero is not: the writer is newer, or broken.
    Reserved {
        /// Which of the reserved words.
        index: u32,
        /// What it holds.
        found: u32,
    },
    /// A number is out of its range, or not a number at all.
    Range {
        /// Which field.
        field: &'static str,
        /// What it holds.
        found: f32,
    },
}

impl fmt::Display for ControlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reserved { index, found } => {
                write!(f, "reserved word {index} of the control block is {found:#x}, not zero")
            }
            Self::Range { field, found } => {
                write!(f, "{field} = {found} of the control block is out of range")
            }
        }
    }
}
impl core::error::Error for ControlError {}

impl Parameters {
    /// Whether every number is one that a sampler can use.
    ///
    /// # Errors
    /// [`ControlError::Range`] with the first that is not.
    pub fn check(&self) -> Result<(), ControlError> {
        let fields = [
            ("lora_scale", self.lora_scale, 0.0, 16.0),
            ("temperature", self.temperature, 0.0, 100.0),
            ("top_p", self.top_p, f32::MIN_POSITIVE, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("repetition_penalty", self.repetition_penalty, f32::MIN_POSITIVE, 10.0),
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
        ];
        for (field, found, low, high) in fields {
            // Not a number is in no range.
            if !(low..=high).contains(&found) {
                return Err(ControlError::Range { field, found });
            }
        }
        Ok(())
    }
}

impl ControlBlock {
    /// A block for models, which cannot make one in place.
    #[cfg(ucm_loom)]
    #[allow(clippy::new_without_default, reason = "a block is not a value to be had anywhere")]
    pub fn new() -> Self {
        let (n, w) = (|| AtomicU32::new(0), || AtomicU64::new(0));
        let block = Self {
            model_id: [w(), w()],
            context_tokens: n(),
            token_limit: n(),
            lora_id: w(),
            lora_scale: n(),
            temperature: n(),
            top_p: n(),
            min_p: n(),
            top_k: n(),
            repetition_penalty: n(),
            presence_penalty: n(),
            frequency_penalty: n(),
            seed: w(),
            reserved: [n()],
        };
        block.store(&Parameters::default());
        block
    }

    /// Writes `parameters`. The move of the status that follows publishes them.
    pub(crate) fn store(&self, parameters: &Parameters) {
        let store = |place: &AtomicU32, value: f32| place.store(value.to_bits(), Ordering::Relaxed);
        for (place, half) in self.model_id.iter().zip(parameters.model_id) {
            place.store(half, Ordering::Relaxed);
        }
        self.context_tokens.store(parameters.context_tokens, Ordering::Relaxed);
        self.token_limit.store(parameters.token_limit, Ordering::Relaxed);
        self.lora_id.store(parameters.lora_id, Ordering::Relaxed);
        store(&self.lora_scale, parameters.lora_scale);
        store(&self.temperature, parameters.temperature);
        store(&self.top_p, parameters.top_p);
        store(&self.min_p, parameters.min_p);
        self.top_k.store(parameters.top_k, Ordering::Relaxed);
        store(&self.repetition_penalty, parameters.repetition_penalty);
        store(&self.presence_penalty, parameters.presence_penalty);
        store(&self.frequency_penalty, parameters.frequency_penalty);
        self.seed.store(parameters.seed, Ordering::Relaxed);
    }

    /// Reads the block.
    ///
    /// # Errors
    /// [`ControlError`] when it cannot be what an engine of this version wrote.
    pub(crate) fn load(&self) -> Result<Parameters, ControlError> {
        for (index, word) in self.reserved.iter().enumerate() {
            let found = word.load(Ordering::Relaxed);
            if found != 0 {
                return Err(ControlError::Reserved { index: index as u32, found });
            }
        }
        let load = |place: &AtomicU32| f32::from_bits(place.load(Ordering::Relaxed));
        let parameters = Parameters {
            model_id: [
                self.model_id[0].load(Ordering::Relaxed),
                self.model_id[1].load(Ordering::Relaxed),
            ],
            context_tokens: self.context_tokens.load(Ordering::Relaxed),
            token_limit: self.token_limit.load(Ordering::Relaxed),
            lora_id: self.lora_id.load(Ordering::Relaxed),
            lora_scale: load(&self.lora_scale),
            temperature: load(&self.temperature),
            top_p: load(&self.top_p),
            min_p: load(&self.min_p),
            top_k: self.top_k.load(Ordering::Relaxed),
            repetition_penalty: load(&self.repetition_penalty),
            presence_penalty: load(&self.presence_penalty),
            frequency_penalty: load(&self.frequency_penalty),
            seed: self.seed.load(Ordering::Relaxed),
        };
        parameters.check()?;
        Ok(parameters)
    }
}
