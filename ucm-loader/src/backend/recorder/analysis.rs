//! Counts from recorded events: loads, duplicates, reloads, waves.

use std::collections::{HashMap, HashSet};

use ucm_core::key::ShardKey;

use super::OK;
use super::log::{Event, EventKind};

/// A wave of loads that were all in flight at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Step {
    /// When its first load began.
    pub start_ns: u64,
    /// When its last load ended.
    pub end_ns: u64,
    /// Its loads. All of them had begun before the first of them ended.
    pub loads: u64,
}

/// What the events say.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LoadAnalysis {
    /// Loads that were begun.
    pub backend_loads: u64,
    /// Of those, loads that ended with an error.
    pub failed_loads: u64,
    /// Of those, loads whose end was never recorded: their process was killed.
    pub unfinished_loads: u64,
    /// Different keys among the loads.
    pub unique_loaded: u64,
    /// Loads of a key that had been loaded before and evicted since.
    pub reloads_after_eviction: u64,
    /// Loads begun while another load of the same key was in flight or a
    /// READY copy of it existed.
    pub duplicate_backend_loads: u64,
    /// READY copies that ceased to be.
    pub evictions: u64,
    /// The most loads in flight at one moment.
    pub peak_in_flight: u64,
    /// The loads in waves: a new one begins with the first load that starts
    /// when one of the current wave has already ended.
    pub steps: Vec<Step>,
}

/// What is known of one key at one moment.
#[derive(Default)]
struct KeyState {
    in_flight: u32,
    ready: bool,
    /// It has been loaded at least once.
    loaded: bool,
    /// An eviction has come since it was last loaded.
    evicted_since: bool,
}

/// Walks through the events in order.
#[derive(Default)]
struct Walk {
    keys: HashMap<ShardKey, KeyState>,
    /// Loads in flight by process and number: their key and index in `intervals`.
    open: HashMap<(u32, u64), (ShardKey, usize)>,
    /// Start and end of every load, by start.
    intervals: Vec<(u64, u64)>,
    result: LoadAnalysis,
}

impl Walk {
    fn start(&mut self, event: &Event) {
        let key = self.keys.entry(event.key).or_default();
        self.result.backend_loads += 1;
        self.result.unique_loaded += u64::from(!key.loaded);
        self.result.duplicate_backend_loads += u64::from(key.in_flight > 0 || key.ready);
        self.result.reloads_after_eviction += u64::from(key.loaded && key.evicted_since);
        key.loaded = true;
        key.evicted_since = false;
        key.in_flight += 1;
        self.open.insert((event.pid, event.number), (event.key, self.intervals.len()));
        self.result.peak_in_flight = self.result.peak_in_flight.max(self.open.len() as u64);
        self.intervals.push((event.time_ns, u64::MAX));
    }

    fn end(&mut self, pid: u32, number: u64, time_ns: u64) -> bool {
        let Some((key, index)) = self.open.remove(&(pid, number)) else { return false };
        self.intervals[index].1 = time_ns;
        if let Some(key) = self.keys.get_mut(&key) {
            key.in_flight -= 1;
        }
        true
    }

    /// Ends all loads of a process that will never end them itself.
    fn bury(&mut self, pid: u32, time_ns: u64) {
        let left: Vec<u64> = self
            .open
            .keys()
            .filter(|(owner, _)| *owner == pid)
            .map(|(_, number)| *number)
            .collect();
        self.result.unfinished_loads += left.len() as u64;
        for number in left {
            self.end(pid, number, time_ns);
        }
    }

    fn see(&mut self, event: &Event) {
        match event.kind {
            EventKind::LoadStart => self.start(event),
            EventKind::LoadEnd => {
                if self.end(event.pid, event.number, event.time_ns) && event.outcome != OK {
                    self.result.failed_loads += 1;
                }
            }
            EventKind::Published => self.keys.entry(event.key).or_default().ready = true,
            EventKind::Evicted => {
                let key = self.keys.entry(event.key).or_default();
                key.ready = false;
                key.evicted_since = true;
                self.result.evictions += 1;
            }
            EventKind::Died => self.bury(event.outcome.0 as u32, event.time_ns),
            EventKind::Cleared => self.keys.values_mut().for_each(|key| key.ready = false),
        }
    }
}

/// Counts. `events` are in the order of their times, as
/// [`read_events`](super::read_events) returns them.
///
/// A load without an end is taken to be in flight until the death of its
/// process was recorded or, if it never was, until that process's last event.
pub fn analyse(events: &[Event]) -> LoadAnalysis {
    let ended: HashSet<(u32, u64)> = events
        .iter()
        .filter(|event| event.kind == EventKind::LoadEnd)
        .map(|event| (event.pid, event.number))
        .collect();
    let buried: HashSet<u32> = events
        .iter()
        .filter(|event| event.kind == EventKind::Died)
        .map(|event| event.outcome.0 as u32)
        .collect();
    // Processes with a load nobody ends, and the last that was heard of them.
    let mut silent: HashMap<u32, usize> = HashMap::new();
    for event in events.iter().filter(|event| event.kind == EventKind::LoadStart) {
        if !ended.contains(&(event.pid, event.number)) && !buried.contains(&event.pid) {
            silent.insert(event.pid, 0);
        }
    }
    for (index, event) in events.iter().enumerate() {
        if let Some(last) = silent.get_mut(&event.pid) {
            *last = index;
        }
    }

    let mut walk = Walk::default();
    for (index, event) in events.iter().enumerate() {
        walk.see(event);
        if silent.get(&event.pid) == Some(&index) {
            walk.bury(event.pid, event.time_ns);
        }
    }
    // What a Died event came too early for.
    let last_ns = events.last().map_or(0, |event| event.time_ns);
    let left: HashSet<u32> = walk.open.keys().map(|(pid, _)| *pid).collect();
    left.into_iter().for_each(|pid| walk.bury(pid, last_ns));
    walk.result.steps = steps(&walk.intervals);
    walk.result
}

fn steps(intervals: &[(u64, u64)]) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut first_end_ns = 0;
    for &(start_ns, end_ns) in intervals {
        match steps.last_mut() {
            Some(step) if start_ns < first_end_ns => {
                step.loads += 1;
                step.end_ns = step.end_ns.max(end_ns);
                first_end_ns = first_end_ns.min(end_ns);
            }
            _ => {
                steps.push(Step { start_ns, end_ns, loads: 1 });
                first_end_ns = end_ns;
            }
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use ucm_core::key::BlockId;
    use ucm_core::slot::meta::LoadErrorCode;

    use super::*;

    /// Events written by hand: (time, kind, key, pid, load number).
    fn events(list: &[(u64, EventKind, u64, u32, u64)]) -> Vec<Event> {
        let event = |&(time_ns, kind, key, pid, number): &(u64, EventKind, u64, u32, u64)| Event {
            time_ns,
            kind,
            key: ShardKey::new(BlockId::from_words(key, 0), 0),
            rank: pid,
            pid,
            number,
            outcome: OK,
        };
        list.iter().map(event).collect()
    }

    use EventKind::{Cleared, Evicted, LoadEnd, LoadStart, Published};

    #[test]
    fn one_load_a_key_is_no_duplicate_and_a_reload_after_eviction_is_none_either() {
        let analysis = analyse(&events(&[
            (1, LoadStart, 7, 0, 1),
            (5, LoadEnd, 7, 0, 1),
            (6, Published, 7, 0, 0),
            (7, LoadStart, 8, 1, 1),
            (8, LoadEnd, 8, 1, 1),
            (9, Published, 8, 1, 0),
            (20, Evicted, 7, 1, 0),
            (21, LoadStart, 7, 1, 2),
            (25, LoadEnd, 7, 1, 2),
        ]));
        assert_eq!(analysis.backend_loads, 3);
        assert_eq!(analysis.unique_loaded, 2);
        assert_eq!(analysis.duplicate_backend_loads, 0);
        assert_eq!(analysis.reloads_after_eviction, 1);
        assert_eq!(analysis.evictions, 1);
    }

    #[test]
    fn a_planted_load_beside_another_in_flight_is_a_duplicate() {
        let analysis = analyse(&events(&[
            (1, LoadStart, 7, 0, 1),
            (2, LoadStart, 7, 1, 1),
            (5, LoadEnd, 7, 0, 1),
            (6, LoadEnd, 7, 1, 1),
        ]));
        assert_eq!(analysis.duplicate_backend_loads, 1);
        assert_eq!(analysis.reloads_after_eviction, 0);
    }

    #[test]
    fn a_planted_load_beside_a_ready_copy_is_a_duplicate_until_it_is_evicted() {
        let load =
            |time, number| [(time, LoadStart, 7, 0, number), (time + 1, LoadEnd, 7, 0, number)];
        let planted = |gone| {
            let mut list = vec![(1, Published, 7, 1, 0)];
            list.extend(gone);
            list.extend(load(10, 1));
            analyse(&events(&list)).duplicate_backend_loads
        };
        assert_eq!(planted(None), 1);
        assert_eq!(planted(Some((5, Evicted, 7, 1, 0))), 0);
        assert_eq!(planted(Some((5, Evicted, 8, 1, 0))), 1);
        assert_eq!(planted(Some((5, Cleared, 0, 1, 0))), 0);
    }

    #[test]
    fn a_retry_after_a_failure_is_neither_a_duplicate_nor_a_reload() {
        let mut list = events(&[
            (1, LoadStart, 7, 0, 1),
            (5, LoadEnd, 7, 0, 1),
            (6, LoadStart, 7, 1, 1),
            (9, LoadEnd, 7, 1, 1),
        ]);
        list[1].outcome = LoadErrorCode(5);
        let analysis = analyse(&list);
        assert_eq!((analysis.backend_loads, analysis.failed_loads), (2, 1));
        assert_eq!(analysis.duplicate_backend_loads, 0);
        assert_eq!(analysis.reloads_after_eviction, 0);
    }

    #[test]
    fn loads_of_the_dead_are_over_when_their_death_is_recorded() {
        let dying = |died_ns: Option<u64>| {
            let mut list = events(&[
                (1, LoadStart, 7, 0, 1),
                (10, LoadStart, 7, 1, 1),
                (12, LoadEnd, 7, 1, 1),
            ]);
            if let Some(time_ns) = died_ns {
                let mut death = events(&[(time_ns, EventKind::Died, 0, 1, 0)])[0];
                death.outcome = LoadErrorCode(0);
                list.push(death);
                list.sort_by_key(|event| event.time_ns);
            }
            analyse(&list)
        };
        // Process 0 never ends its load: with no word of its death it counts
        // until its last event, which is the start.
        assert_eq!((dying(None).unfinished_loads, dying(None).duplicate_backend_loads), (1, 0));
        assert_eq!(dying(Some(5)).duplicate_backend_loads, 0);
        assert_eq!(dying(Some(11)).duplicate_backend_loads, 1);
        assert_eq!(dying(Some(11)).unfinished_loads, 1);
    }

    #[test]
    fn waves_of_four_are_three_steps_with_four_in_flight() {
        let mut list = Vec::new();
        for wave in 0..3 {
            for rank in 0..4 {
                let key = u64::from(wave * 4 + rank);
                let start = u64::from(wave * 100 + rank);
                list.push((start, LoadStart, key, rank, u64::from(wave)));
                list.push((start + 90, LoadEnd, key, rank, u64::from(wave)));
            }
        }
        list.sort_by_key(|event| event.0);
        let analysis = analyse(&events(&list));
        assert_eq!(analysis.peak_in_flight, 4);
        assert_eq!(analysis.steps.iter().map(|step| step.loads).collect::<Vec<_>>(), [4, 4, 4]);
        assert_eq!(analysis.steps[1], Step { start_ns: 100, end_ns: 193, loads: 4 });
    }

    #[test]
    fn one_load_after_the_other_is_a_step_each() {
        let list: Vec<_> = (0..12)
            .flat_map(|n| [(n * 10, LoadStart, n, 0, n), (n * 10 + 10, LoadEnd, n, 0, n)])
            .collect();
        let mut list = events(&list);
        list.sort_by_key(|event| (event.time_ns, event.kind == LoadStart));
        let analysis = analyse(&list);
        assert_eq!((analysis.steps.len(), analysis.peak_in_flight), (12, 1));
    }

    #[test]
    fn no_events_are_no_loads() {
        assert_eq!(analyse(&[]), LoadAnalysis::default());
    }
}
