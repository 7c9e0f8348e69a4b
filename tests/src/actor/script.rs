//! Reading lines, doing what they say, answering each with one line.

use std::io::{BufRead, Write};
use std::os::fd::AsRawFd;
use std::str::FromStr;
use std::sync::Arc;

use nix::sys::signal::Signal;
use ucm_core::host::Waiter;
use ucm_core::{Got, Loading, Pending, Pinned};
use ucm_posix::Segment;

use crate::actor::rank::{Filling, How, Rank};
use crate::actor::{crash, hammer, transfer};
use crate::board::Board;
use crate::keys::{SHARDS_PER_BLOCK, key};
use crate::setup::Place;

/// How long a load of a script may take: no test waits for that.
const PATIENCE_MS: u64 = 600_000;

enum Token {
    Pinned(Pinned),
    Loading(Loading),
    Pending(Pending),
}

/// The process's state between two lines.
pub struct Actor {
    place: Place,
    board: &'static Board,
    rank: Option<Rank>,
    /// Descriptors that joining has opened: the rank's lock byte.
    byte_fds: Vec<i32>,
    tokens: Vec<(u64, Token)>,
}

type Answer = Result<String, String>;

fn argument<T: FromStr>(words: &[&str], at: usize) -> Result<T, String> {
    let word = words.get(at).ok_or_else(|| format!("argument {at} is missing"))?;
    word.parse().map_err(|_| format!("bad argument {word}"))
}

/// Asked one by one: a directory being read would be one of them itself.
fn open_fds() -> Vec<i32> {
    let is_open = |fd: &i32| std::fs::symlink_metadata(format!("/proc/self/fd/{fd}")).is_ok();
    (0..64).filter(is_open).collect()
}

impl Actor {
    /// Ready for the first line. Dies with whoever started it.
    ///
    /// # Errors
    /// A board that cannot be opened.
    pub fn new(place: Place) -> std::io::Result<Self> {
        nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
        let board: &'static Board = Box::leak(Box::new(Board::open(&place.board_path())?));
        crash::install(board);
        Ok(Self { place, board, rank: None, byte_fds: Vec::new(), tokens: Vec::new() })
    }

    /// Acts until the input ends.
    pub fn act(mut self) {
        let mut out = std::io::stdout();
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let answer = match self.perform(&words) {
                Ok(answer) => answer,
                Err(error) => format!("error {error}"),
            };
            if writeln!(out, "{answer}").and_then(|()| out.flush()).is_err() {
                return;
            }
        }
    }

    fn open(&self) -> Result<Arc<Segment>, String> {
        let options = self.place.options().map_err(|error| error.to_string())?;
        Segment::open_or_create(&options).map(Arc::new).map_err(|error| error.to_string())
    }

    fn rank(&self) -> Result<&Rank, String> {
        self.rank.as_ref().ok_or_else(|| "not joined".to_string())
    }

    fn take(&mut self, id: u64, wanted: fn(&Token) -> bool) -> Result<Token, String> {
        let at = self.tokens.iter().position(|(held, token)| *held == id && wanted(token));
        at.map(|at| self.tokens.remove(at).1).ok_or_else(|| format!("no such token of key {id}"))
    }

    fn take_loading(&mut self, id: u64) -> Result<Loading, String> {
        match self.take(id, |token| matches!(token, Token::Loading(_)))? {
            Token::Loading(loading) => Ok(loading),
            Token::Pinned(_) | Token::Pending(_) => unreachable!("asked for a load"),
        }
    }

    fn take_pending(&mut self, id: u64) -> Result<Pending, String> {
        match self.take(id, |token| matches!(token, Token::Pending(_)))? {
            Token::Pending(pending) => Ok(pending),
            Token::Pinned(_) | Token::Loading(_) => unreachable!("asked for a wait"),
        }
    }

    fn keep(&mut self, id: u64, token: Token) {
        self.tokens.push((id, token));
    }

    fn perform(&mut self, words: &[&str]) -> Answer {
        let id = || argument::<u64>(words, 1);
        match words.first().copied().unwrap_or("") {
            "join" => self.join(argument(words, 1)?),
            "leave" => {
                self.tokens.clear();
                self.rank = None;
                Ok("left".to_string())
            }
            "get" => self.get(id()?, argument(words, 2).unwrap_or(PATIENCE_MS)),
            "half" | "fill" => self.fill(id()?, words[0] == "fill"),
            "publish" => {
                let loading = self.take_loading(id()?)?;
                let published = self.rank()?.publish(id()?, loading);
                let pinned = published.map_err(|trouble| format!("{trouble:?}"))?;
                self.keep(id()?, Token::Pinned(pinned));
                Ok("published".to_string())
            }
            "fail" => {
                let loading = self.take_loading(id()?)?;
                let failed = self.rank()?.fail(id()?, loading);
                failed.map(|()| "failed".to_string()).map_err(|trouble| format!("{trouble:?}"))
            }
            "wait" => self.wait(id()?, argument(words, 2)?),
            "sleep" => self.sleep(id()?),
            "check" => self.check(id()?),
            "release" => self.release(id()?),
            "load" | "keep" => self.load(id()?, words[0] == "keep"),
            "loads" => self.loads(id()?, argument(words, 2)?),
            "prepare" => self.prepare(id()?),
            "touch" => Ok(format!("touched {}", self.rank()?.cache().touch(&[key(id()?).block]))),
            "transfer" => self.transfer(id()?, argument(words, 2)?),
            "reap" => Ok(format!("reaped {}", self.rank()?.cache().reap_dead())),
            "race" => {
                let (count, ranks) = (argument(words, 2)?, argument(words, 3)?);
                hammer::race(self.rank()?, self.board, id()?, count, ranks)
                    .map(|()| "raced".to_string())
                    .map_err(|trouble| format!("{trouble:?}"))
            }
            "hammer" | "hammer-dma" => {
                let (keys, rounds) = (argument(words, 2)?, argument(words, 3)?);
                let dma = words[0] == "hammer-dma";
                hammer::hammer(self.rank()?, self.board, id()?, keys, rounds, dma);
                Ok("hammered".to_string())
            }
            "blind" => {
                hammer::blind(self.rank()?, id()?, argument(words, 2)?, argument(words, 3)?);
                Ok("blinded".to_string())
            }
            "dma" => {
                transfer::serve(&*self.open()?, self.board);
                Ok("done".to_string())
            }
            "forsake" => self.forsake(),
            "crash-at" => {
                let mode: String = argument(words, 3)?;
                let point: String = argument(words, 1)?;
                crash::arm(&point, argument(words, 2)?, &mode).map(|()| "armed".to_string())
            }
            other => Err(format!("no such command: {other}")),
        }
    }

    fn join(&mut self, rank: u32) -> Answer {
        let segment = self.open()?;
        let before = open_fds();
        let joined = Rank::join(segment, rank, self.board).map_err(|error| error.to_string())?;
        self.byte_fds = open_fds().into_iter().filter(|fd| !before.contains(fd)).collect();
        self.rank = Some(joined);
        Ok("joined".to_string())
    }

    fn get(&mut self, id: u64, ms: u64) -> Answer {
        let rank = self.rank()?;
        let got = rank.get(id, rank.deadline_ns(ms)).map_err(|error| format!("{error:?}"))?;
        let (answer, token) = match got {
            Got::Hit(pinned) => {
                rank.check(id, &pinned);
                (format!("hit {}", pinned.slot()), Token::Pinned(pinned))
            }
            Got::Owner(loading) => (format!("owner {}", loading.slot()), Token::Loading(loading)),
            Got::Wait(pending) => (format!("wait {}", pending.slot()), Token::Pending(pending)),
        };
        self.keep(id, token);
        Ok(answer)
    }

    fn fill(&mut self, id: u64, whole: bool) -> Answer {
        let loading = self.take_loading(id)?;
        self.rank()?.fill(id, &loading, whole);
        self.keep(id, Token::Loading(loading));
        Ok("filled".to_string())
    }

    fn wait(&mut self, id: u64, ms: u64) -> Answer {
        let pending = self.take_pending(id)?;
        let pinned = self.rank()?.wait(id, pending, ms).map_err(|error| format!("{error:?}"))?;
        let slot = pinned.slot();
        self.keep(id, Token::Pinned(pinned));
        Ok(format!("ready {slot}"))
    }

    /// Without the cache's own care: no slices, no look at the owner. Only a
    /// wake ends this.
    fn sleep(&mut self, id: u64) -> Answer {
        let pending = self.take_pending(id)?;
        let cache = self.rank()?.cache();
        while cache.poll(&pending) == ucm_core::cache::Progress::Loading {
            if let Some((word, expected)) = cache.arm(&pending) {
                cache.host().wait(word, expected, u64::MAX);
            }
        }
        self.keep(id, Token::Pending(pending));
        Ok("woken".to_string())
    }

    fn check(&mut self, id: u64) -> Answer {
        let token = self.take(id, |token| matches!(token, Token::Pinned(_)))?;
        let right = match &token {
            Token::Pinned(pinned) => self.rank()?.check(id, pinned),
            Token::Loading(_) | Token::Pending(_) => unreachable!("asked for a pin"),
        };
        self.keep(id, token);
        Ok(if right { "right" } else { "wrong" }.to_string())
    }

    fn release(&mut self, id: u64) -> Answer {
        let token = self.take(id, |_| true)?;
        let rank = self.rank()?;
        match token {
            Token::Pinned(pinned) => {
                rank.check(id, &pinned);
                rank.cache().release(pinned);
            }
            Token::Pending(pending) => rank.cache().cancel(pending),
            Token::Loading(loading) => {
                rank.fail(id, loading).map_err(|trouble| format!("{trouble:?}"))?;
            }
        }
        Ok("released".to_string())
    }

    fn load(&mut self, id: u64, keep: bool) -> Answer {
        let rank = self.rank()?;
        let filling = Filling::Direct(&mut || {});
        let (how, pinned) = rank
            .acquire(id, PATIENCE_MS, PATIENCE_MS, filling)
            .map_err(|trouble| format!("{trouble:?}"))?;
        let slot = pinned.slot();
        if keep {
            self.keep(id, Token::Pinned(pinned));
        } else {
            rank.cache().release(pinned);
        }
        let how = match how {
            How::Hit => "hit",
            How::Owner => "owner",
            How::Waited => "waited",
        };
        Ok(format!("{how} {slot}"))
    }

    fn loads(&mut self, from: u64, to: u64) -> Answer {
        let mut owned = 0;
        for id in from..to {
            owned += u64::from(self.load(id, false)?.starts_with("owner"));
        }
        Ok(format!("loaded {owned}"))
    }

    fn prepare(&mut self, id: u64) -> Answer {
        if id.is_multiple_of(SHARDS_PER_BLOCK) {
            return Err("the first shard of a block has nothing before it".to_string());
        }
        Ok(format!("prepared {}", self.rank()?.cache().prepare_next(&key(id - 1))))
    }

    fn transfer(&mut self, id: u64, ms: u64) -> Answer {
        let loading = self.take_loading(id)?;
        self.rank()?.submit(id, &loading, ms * 1_000_000);
        self.keep(id, Token::Loading(loading));
        Ok("submitted".to_string())
    }

    /// The lock of a byte goes with its description, so another file in its
    /// place is what death looks like to everybody else.
    fn forsake(&mut self) -> Answer {
        let null = std::fs::File::open("/dev/null").map_err(|error| error.to_string())?;
        for &fd in &self.byte_fds {
            // SAFETY: `fd` stays open and stays its owner's; what it refers to
            // changes, which only file locks notice.
            if unsafe { libc::dup2(null.as_raw_fd(), fd) } < 0 {
                return Err(std::io::Error::last_os_error().to_string());
            }
        }
        Ok(format!("forsaken {}", self.byte_fds.len()))
    }
}
