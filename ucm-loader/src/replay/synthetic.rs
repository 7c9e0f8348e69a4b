//! Made-up chat traffic, for places where no recorded trace is.
//!
//! The model: sessions begin at random moments. Each session has one of a few
//! system prompts, chosen by Zipf's law (the k-th is 1/k as popular as the
//! first), and goes through a number of turns. A turn's prompt is everything
//! said so far: system prompt, earlier questions and answers, the new
//! question. Between an answer and the next question the user thinks. So
//! sessions share the blocks of their system prompts, each turn shares its
//! predecessor's whole blocks, and everything else is new.
//!
//! A block's number stands for all tokens up to its end. It is made from the
//! system prompt where the block lies within it, else from the session; the
//! last block of a prompt, if it is not full, is that turn's alone, because
//! the next turn fills it up with other tokens.
//!
//! Everything is drawn with integers from the seed: the same configuration
//! gives the same requests on every machine.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::trace::{BLOCK_TOKENS, TraceRequest};
use crate::content::mix;

/// Mean rate at which an answer is produced: 20 ms a token.
const MS_PER_OUTPUT_TOKEN: u64 = 20;
/// Numbers stay below 2^53, so that every JSON reader takes them exactly.
const NUMBER_BITS: u32 = 53;
/// Steps into which the exponential distribution is cut.
const EXPONENTIAL_STEPS: u64 = 16;

/// What the traffic is like. Means are of exponential distributions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChatConfig {
    /// Everything is drawn from it.
    pub seed: u64,
    /// Requests in all.
    pub requests: u64,
    /// System prompts there are.
    pub system_prompts: u32,
    /// Their lengths: the k-th has this and up to as much again.
    pub system_prompt_tokens: u64,
    /// Mean time between two sessions' beginnings, in milliseconds.
    pub session_gap_ms: u64,
    /// Mean number of turns of a session, at least one.
    pub turns: u64,
    /// Mean length of a question, in tokens.
    pub question_tokens: u64,
    /// Mean length of an answer, in tokens.
    pub answer_tokens: u64,
    /// Mean time a user thinks, in milliseconds.
    pub think_ms: u64,
    /// A session whose prompt would exceed so many tokens ends.
    pub context_tokens: u64,
}

impl Default for ChatConfig {
    /// About 13 blocks a request, of which a good half is shared.
    fn default() -> Self {
        Self {
            seed: 0,
            requests: 1000,
            system_prompts: 16,
            system_prompt_tokens: 1500,
            session_gap_ms: 1000,
            turns: 5,
            question_tokens: 700,
            answer_tokens: 350,
            think_ms: 20_000,
            context_tokens: 131_072,
        }
    }
}

/// A splitmix generator.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// Uniform in `0..limit`; the bias of the remainder is below 2^-32 here.
    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    /// Exponential with this mean, in steps of a sixteenth of it. Logarithms
    /// differ in the last bit from one library to the next; counting does not.
    fn exponential(&mut self, mean: u64) -> u64 {
        let mut steps = 0;
        while self.below(EXPONENTIAL_STEPS) != 0 {
            steps += 1;
        }
        let within = self.below(mean.div_ceil(EXPONENTIAL_STEPS));
        mean * steps / EXPONENTIAL_STEPS + within
    }
}

struct Session {
    number: u64,
    system_prompt: u64,
    system_tokens: u64,
    /// Tokens said so far, the question of the coming turn included.
    tokens: u64,
    turn: u64,
    turns: u64,
}

/// The traffic, in the order of its timestamps.
pub struct ChatTraffic {
    config: ChatConfig,
    draw: Draw,
    /// Sessions by the time of their next question; the number breaks ties.
    waiting: BinaryHeap<Reverse<(u64, u64)>>,
    sessions: std::collections::HashMap<u64, Session>,
    next_session: u64,
    next_session_ms: u64,
    left: u64,
    /// Running sums of the system prompts' weights.
    popularity: Vec<u64>,
}

impl ChatTraffic {
    /// Traffic as configured.
    pub fn new(config: ChatConfig) -> Self {
        let weight = |rank: u64| (1 << 32) / rank;
        let popularity = (1..=u64::from(config.system_prompts.max(1)))
            .scan(0, |sum, rank| {
                *sum += weight(rank);
                Some(*sum)
            })
            .collect();
        Self {
            draw: Draw(mix(config.seed)),
            waiting: BinaryHeap::new(),
            sessions: std::collections::HashMap::new(),
            next_session: 0,
            next_session_ms: 0,
            left: config.requests,
            popularity,
            config,
        }
    }

    fn begin_session(&mut self) {
        let at_ms = self.next_session_ms;
        self.next_session_ms += self.draw.exponential(self.config.session_gap_ms);
        let total = self.popularity.last().copied().unwrap_or(1);
        let drawn = self.draw.below(total);
        let system_prompt = self.popularity.partition_point(|sum| *sum <= drawn) as u64;
        let spread =
            mix(self.config.seed ^ mix(system_prompt)) % self.config.system_prompt_tokens.max(1);
        let system_tokens = self.config.system_prompt_tokens + spread;
        let turns = 1 + self.draw.exponential(self.config.turns.saturating_sub(1));
        let tokens = system_tokens + 1 + self.draw.exponential(self.config.question_tokens);
        let number = self.next_session;
        self.next_session += 1;
        let session = Session { number, system_prompt, system_tokens, tokens, turn: 0, turns };
        self.sessions.insert(number, session);
        self.waiting.push(Reverse((at_ms, number)));
    }

    fn ask(&mut self, at_ms: u64, mut session: Session) -> TraceRequest {
        let output_length = 1 + self.draw.exponential(self.config.answer_tokens);
        let request = TraceRequest {
            timestamp: at_ms,
            input_length: session.tokens,
            output_length,
            hash_ids: blocks(self.config.seed, &session),
        };
        session.turn += 1;
        session.tokens += output_length + 1 + self.draw.exponential(self.config.question_tokens);
        if session.turn < session.turns && session.tokens <= self.config.context_tokens {
            let thinking_ms = self.draw.exponential(self.config.think_ms);
            let next_ms = at_ms + output_length * MS_PER_OUTPUT_TOKEN + thinking_ms;
            self.waiting.push(Reverse((next_ms, session.number)));
            self.sessions.insert(session.number, session);
        }
        request
    }
}

fn blocks(seed: u64, session: &Session) -> Vec<u64> {
    let number = |kind: u64, owner: u64, block: u64, turn: u64| {
        let value =
            [kind, owner, block, turn].iter().fold(seed, |sum, part| mix(sum).wrapping_add(*part));
        mix(value) >> (u64::BITS - NUMBER_BITS)
    };
    let block = |index: u64| {
        let end = (index + 1) * BLOCK_TOKENS;
        if end <= session.system_tokens {
            number(1, session.system_prompt, index, 0)
        } else if end <= session.tokens {
            number(2, session.number, index, 0)
        } else {
            number(3, session.number, index, session.turn)
        }
    };
    (0..session.tokens.div_ceil(BLOCK_TOKENS)).map(block).collect()
}

impl Iterator for ChatTraffic {
    type Item = TraceRequest;

    fn next(&mut self) -> Option<TraceRequest> {
        self.left = self.left.checked_sub(1)?;
        // A new session may come before the next question of an old one.
        while self.waiting.peek().is_none_or(|Reverse((at_ms, _))| *at_ms >= self.next_session_ms) {
            self.begin_session();
        }
        let Reverse((at_ms, number)) = self.waiting.pop()?;
        let session = self.sessions.remove(&number)?;
        Some(self.ask(at_ms, session))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;

    fn traffic(change: impl FnOnce(&mut ChatConfig)) -> Vec<TraceRequest> {
        let mut config = ChatConfig::default();
        change(&mut config);
        ChatTraffic::new(config).collect()
    }

    #[test]
    fn the_same_seed_gives_the_same_traffic_and_another_seed_another() {
        let first = traffic(|_| {});
        assert_eq!(first.len(), 1000);
        assert_eq!(first, traffic(|_| {}));
        let other = traffic(|c| c.seed = 1);
        let blocks = |requests: &[TraceRequest]| -> HashSet<u64> {
            requests.iter().flat_map(|request| request.hash_ids.clone()).collect()
        };
        assert!(blocks(&first).is_disjoint(&blocks(&other)));
    }

    #[test]
    fn time_never_runs_backwards_and_lengths_agree_with_blocks() {
        let requests = traffic(|_| {});
        assert!(requests.windows(2).all(|pair| pair[0].timestamp <= pair[1].timestamp));
        for request in &requests {
            assert_eq!(request.hash_ids.len() as u64, request.input_length.div_ceil(BLOCK_TOKENS));
            assert!(request.output_length > 0);
            assert!(request.hash_ids.iter().all(|id| *id < 1 << NUMBER_BITS));
        }
    }

    #[test]
    fn equal_numbers_stand_for_equal_prefixes() {
        let mut before: HashMap<u64, Option<u64>> = HashMap::new();
        for request in traffic(|_| {}) {
            let mut previous = None;
            for id in request.hash_ids {
                assert_eq!(*before.entry(id).or_insert(previous), previous);
                previous = Some(id);
            }
        }
    }

    #[test]
    fn a_good_part_of_the_blocks_has_been_seen_before() {
        let mut seen = HashSet::new();
        let (mut hits, mut blocks) = (0_u32, 0_u32);
        for request in traffic(|_| {}) {
            for id in request.hash_ids {
                hits += u32::from(!seen.insert(id));
                blocks += 1;
            }
        }
        let share = f64::from(hits) / f64::from(blocks);
        assert!((0.4..0.9).contains(&share), "{share}");
    }

    #[test]
    fn popular_system_prompts_are_shared_by_more_sessions() {
        let mut firsts: HashMap<u64, u32> = HashMap::new();
        for request in traffic(|c| c.turns = 1) {
            *firsts.entry(request.hash_ids[0]).or_default() += 1;
        }
        assert!(firsts.len() <= 16);
        let mut counts: Vec<u32> = firsts.into_values().collect();
        counts.sort_unstable_by(|a, b| b.cmp(a));
        assert!(counts[0] > 3 * counts[7], "{counts:?}");
    }

    #[test]
    fn a_session_ends_before_it_outgrows_its_context() {
        let requests = traffic(|c| {
            c.turns = 1000;
            c.context_tokens = 8000;
            c.requests = 3000;
        });
        let longest = requests.iter().map(|request| request.input_length).max();
        assert!(longest.is_some_and(|tokens| tokens > 4000));
        // Only a first question may be longer than the context.
        assert!(requests.iter().filter(|request| request.input_length > 8000).count() < 30);
    }
}
