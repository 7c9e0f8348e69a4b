//! What the ranks are asked for: the product's own chat traffic, and which blocks are stored.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ucm_loader::replay::synthetic::{ChatConfig, ChatTraffic};

/// Blocks of one request at most.
pub const MAX_BLOCKS: usize = 24;
/// New blocks that are dumped at a time.
const MAX_DUMPED: usize = 8;

struct State {
    chat: ChatTraffic,
    /// The requests so far, by number.
    requests: Vec<Vec<u64>>,
    stored: HashSet<u64>,
}

/// One rank's part in a request.
pub struct Part {
    /// Blocks that are stored, to be loaded and compared.
    pub load: Vec<u64>,
    /// Blocks that are not, to be made and dumped.
    pub dump: Vec<u64>,
}

/// Requests that every rank goes through in order, as the ranks of one model do.
pub struct Traffic {
    state: Mutex<State>,
    ranks: u32,
}

impl Traffic {
    /// Endless traffic.
    pub fn new(seed: u64, ranks: u32) -> Self {
        let chat = ChatConfig { seed, requests: u64::MAX, ..ChatConfig::default() };
        let state =
            State { chat: ChatTraffic::new(chat), requests: Vec::new(), stored: HashSet::new() };
        Self { state: Mutex::new(state), ranks }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many requests anybody has begun; a rank that was away goes on there.
    pub fn newest(&self) -> usize {
        self.lock().requests.len().saturating_sub(1)
    }

    /// What `rank` does for request `number`. Two ranks in turn dump what is new.
    pub fn part(&self, number: usize, rank: u32) -> Part {
        let mut state = self.lock();
        while state.requests.len() <= number {
            let mut blocks = state.chat.next().map(|it| it.hash_ids).unwrap_or_default();
            blocks.truncate(MAX_BLOCKS);
            state.requests.push(blocks);
        }
        let blocks = &state.requests[number];
        let (load, mut dump): (Vec<u64>, Vec<u64>) =
            blocks.iter().partition(|block| state.stored.contains(block));
        dump.truncate(MAX_DUMPED);
        let turn = (number as u32).wrapping_add(rank) % self.ranks;
        if turn > 1 {
            dump.clear();
        }
        Part { load, dump }
    }

    /// These are stored, whole and for good.
    pub fn store(&self, blocks: &[u64]) {
        self.lock().stored.extend(blocks);
    }

    /// Everything that is stored.
    pub fn stored(&self) -> Vec<u64> {
        self.lock().stored.iter().copied().collect()
    }
}
