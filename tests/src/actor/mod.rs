//! A child process that does what it is told, one line at a time.
//!
//! | line | does | answers |
//! |---|---|---|
//! | `join RANK` | opens the segment and takes the rank's place | `joined` |
//! | `get ID` | asks for key `ID` and keeps the token | `hit SLOT`, `owner SLOT`, `wait SLOT` |
//! | `half ID`, `fill ID` | as owner: writes the first half of its bytes, or all | `filled` |
//! | `publish ID`, `fail ID` | as owner: ends the load | `published`, `failed` |
//! | `wait ID MS` | waits for the load, keeps the pin | `ready SLOT` |
//! | `sleep ID` | sleeps on the load without any timeout, keeps its place | `woken` |
//! | `check ID` | compares the bytes of a pinned slot | `right`, `wrong` |
//! | `release ID` | gives the token back, whatever it is | `released` |
//! | `load ID`, `keep ID` | gets, fills or waits, checks; lets go, or keeps the pin | `owner`, `hit` or `waited SLOT` |
//! | `loads FROM TO` | loads the keys `FROM..TO` | `loaded N`, as owner |
//! | `prepare ID` | has the slot of `ID` prepared | `prepared true` or `false` |
//! | `touch ID` | touches the key's block | `touched N` |
//! | `transfer ID MS` | as owner: has the `dma` process write the bytes `MS` later | `submitted` |
//! | `reap` | reaps whoever is dead | `reaped N` |
//! | `race FIRST COUNT RANKS` | starts `COUNT` gets together with all other ranks | `raced` |
//! | `hammer SEED KEYS ROUNDS` | a random mix of everything, until done or stopped | `hammered` |
//! | `blind SEED KEYS ROUNDS` | the same mix without looking at anything, for segments that are scribbled on | `blinded` |
//! | `dma` | performs transfers until stopped | `done` |
//! | `forsake` | loses its lock byte, as if it were dead, and lives on | `forsaken` |
//! | `crash-at POINT N MODE` | at the N-th passing from now: `kill`, `stop` or `pause:MS` | `armed` |
//! | `leave` | gives everything back | `left` |
//!
//! What does not work answers `error` and why. [`script`](self) reads the
//! lines, [`rank`] moves bytes, [`hammer`] and [`transfer`] are the long
//! errands, [`crash`] the points at which it dies.

pub mod crash;
pub mod hammer;
pub mod rank;
mod script;
pub mod transfer;

pub use script::Actor;
