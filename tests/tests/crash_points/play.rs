//! Playing a scenario: a victim that dies or stops on the way, and helpers that go on.

use ucm_core::Geometry;
use ucm_core::crash::Point;
use ucm_tests::keys;
use ucm_tests::process::{Heard, Process};
use ucm_tests::setup::Setup;
use ucm_tests::stage::Stage;

use crate::scenario::Scenario;

pub const ACTOR: &str = env!("CARGO_BIN_EXE_actor");

/// Keys below this are what scenarios play with.
const PLAYED: u64 = 64;

/// A stage with a victim (rank 0) and helpers.
pub struct Play {
    pub stage: Stage,
    pub victim: Process,
    pub helpers: Vec<Process>,
    scenario: Scenario,
    crowd: Vec<u64>,
}

impl Play {
    /// The stage set for `scenario`; the victim is there and has not joined.
    pub fn new(scenario: Scenario) -> Self {
        let slots = match scenario {
            Scenario::Crowding | Scenario::Reaping | Scenario::Succeeding => 64,
            _ => 16,
        };
        let setup = Setup { slots, ranks: 6, quarantine_ms: 20, ..Setup::default() };
        let stage = Stage::new(setup, ACTOR);
        let buckets = bucket_count(&stage);
        let helpers = vec![stage.rank(1), stage.rank(2)];
        let victim = stage.start();
        let crowd = keys::crowd(buckets).take(20).collect();
        Self { stage, victim, helpers, scenario, crowd }
    }

    /// The victim acts, up to the end or until it is dead or stopped: says
    /// which. `arm` is a line for it; it counts passings from there on.
    pub fn act(&mut self, arm: &str) -> bool {
        let joined_later = matches!(self.scenario, Scenario::Comings | Scenario::Succeeding);
        if !joined_later {
            self.victim.expect("join 0", "joined");
        }
        let done = match self.scenario {
            Scenario::Comings => self.comings(arm),
            Scenario::Succeeding => self.succeeding(arm),
            Scenario::Hitting => self.hitting(arm),
            Scenario::Missing => self.missing(arm),
            Scenario::Preparing => self.preparing(arm),
            Scenario::TakingOver => self.taking_over(arm),
            Scenario::Aborting => self.aborting(arm),
            Scenario::Aborted => self.aborted(arm),
            Scenario::MeetingPins => self.meeting_pins(arm),
            Scenario::Withdrawing => self.withdrawing(arm),
            Scenario::Crowding => self.crowding(arm),
            Scenario::Publishing => self.publishing(arm),
            Scenario::Failing => self.failing(arm),
            Scenario::Waiting => self.waiting(arm),
            Scenario::Reaping => self.reaping(arm),
        };
        done.is_none()
    }

    fn arm(&mut self, arm: &str) {
        self.victim.expect(arm, "armed");
    }

    /// Everything helpers stand still at or wait for goes on, whatever it is.
    fn helper_answers(&mut self, at: usize) -> String {
        self.helpers[at].resume();
        loop {
            match self.helpers[at].hear_any() {
                Heard::Line(line) => return line,
                Heard::Stopped => {}
                Heard::Died(signal) => panic!("a helper died of {signal:?}"),
            }
        }
    }

    fn comings(&mut self, arm: &str) -> Option<()> {
        self.arm(arm);
        for _ in 0..2 {
            self.victim.tell("join 0")?;
            self.victim.tell("keep 1")?;
            self.victim.tell("get 2")?;
            self.victim.tell("leave")?;
        }
        Some(())
    }

    fn succeeding(&mut self, arm: &str) -> Option<()> {
        let stage = &self.stage;
        leave_a_mess(stage, 0, 10);
        self.arm(arm);
        self.victim.tell("join 0")?;
        self.victim.tell("loads 0 40")?;
        Some(())
    }

    fn hitting(&mut self, arm: &str) -> Option<()> {
        self.arm(arm);
        for id in [1, 2] {
            self.victim.tell(&format!("load {id}"))?;
            for _ in 0..3 {
                self.victim.tell(&format!("load {id}"))?;
            }
        }
        Some(())
    }

    fn missing(&mut self, arm: &str) -> Option<()> {
        self.helpers[0].expect("loads 100 120", "loaded");
        self.arm(arm);
        for id in 1..20 {
            self.victim.tell(&format!("load {id}"))?;
        }
        Some(())
    }

    fn preparing(&mut self, arm: &str) -> Option<()> {
        self.helpers[0].expect("loads 100 120", "loaded");
        self.arm(arm);
        for id in [1, 5, 9, 13] {
            self.victim.tell(&format!("prepare {id}"))?;
        }
        Some(())
    }

    fn taking_over(&mut self, arm: &str) -> Option<()> {
        self.helpers[0].expect("get 1", "owner");
        self.helpers[0].expect("fail 1", "failed");
        self.helpers[0].expect("prepare 5", "prepared true");
        self.arm(arm);
        for id in [1, 5] {
            self.victim.tell(&format!("load {id}"))?;
        }
        Some(())
    }

    fn aborting(&mut self, arm: &str) -> Option<()> {
        for id in [1, 2] {
            self.helpers[0].expect("crash-at InsertScanned 1 stop", "armed");
            self.helpers[0].say(&format!("load {id}"));
            self.helpers[0].expect_stop();
            if id == 1 {
                self.arm(arm);
            }
            let told = self.victim.tell(&format!("load {id}"));
            self.helper_answers(0);
            told?;
        }
        Some(())
    }

    /// Here the one who aborts is the helper.
    fn aborted(&mut self, arm: &str) -> Option<()> {
        self.arm(arm);
        for id in [1, 2] {
            self.victim_stops_at("InsertScanned", id)?;
            self.helpers[0].expect(&format!("load {id}"), "owner");
            self.victim.resume();
            self.victim_goes_on()?;
        }
        Some(())
    }

    fn victim_goes_on(&mut self) -> Option<String> {
        match self.victim.hear_any() {
            Heard::Line(line) => Some(line),
            Heard::Died(_) | Heard::Stopped => None,
        }
    }

    /// The victim loads `id` and stands still at `point`, unless it dies before.
    fn victim_stops_at(&mut self, point: &str, id: u64) -> Option<()> {
        self.victim.expect(&format!("crash-at {point} 1 stop"), "armed");
        self.victim.say(&format!("load {id}"));
        match self.victim.hear_any() {
            Heard::Stopped => Some(()),
            Heard::Died(_) => None,
            Heard::Line(line) => panic!("{line}: past {point}"),
        }
    }

    fn meeting_pins(&mut self, arm: &str) -> Option<()> {
        self.arm(arm);
        for (round, id) in [(0_u64, 1), (1, 2)] {
            // All slots READY and, once the victim has chosen one, all pinned.
            let own = 100 + 20 * round..116 + 20 * round;
            self.helpers[0].expect(&format!("loads {} {}", own.start, own.end), "loaded");
            self.victim_stops_at("EvictChosen", id)?;
            own.clone().for_each(|id| {
                self.helpers[0].expect(&format!("keep {id}"), "hit");
            });
            self.victim.resume();
            // It finds everything pinned and tries on, or dies of it.
            let board = self.stage.board();
            let victim = &mut self.victim;
            let mut heard = None;
            self.stage.until("a pinned victim", || {
                heard = victim.hear_now();
                heard.is_some() || board.passed(Point::EvictPinned) > round
            });
            own.for_each(|id| {
                self.helpers[0].expect(&format!("release {id}"), "released");
            });
            match heard {
                None => self.victim_goes_on()?,
                Some(Heard::Line(line)) => panic!("{line}: all was pinned"),
                Some(Heard::Died(_) | Heard::Stopped) => return None,
            };
        }
        Some(())
    }

    fn withdrawing(&mut self, arm: &str) -> Option<()> {
        self.arm(arm);
        for id in [11, 12] {
            self.victim_stops_at("InsertAnnounced", id)?;
            self.helpers[1].expect(&format!("load {id}"), "owner");
            self.victim.resume();
            let line = self.victim_goes_on()?;
            assert!(line.starts_with("hit"), "{line}");
        }
        Some(())
    }

    fn crowding(&mut self, arm: &str) -> Option<()> {
        let (crowd, late) = self.crowd.split_at(16);
        for id in crowd {
            self.helpers[0].expect(&format!("load {id}"), "owner");
        }
        self.victim.expect(arm, "armed");
        for id in late {
            self.victim.tell(&format!("load {id}"))?;
        }
        Some(())
    }

    fn publishing(&mut self, arm: &str) -> Option<()> {
        self.arm(arm);
        for id in [1, 2] {
            self.asleep_for(id)?;
            self.victim.expect(&format!("fill {id}"), "filled");
            let told = self.victim.tell(&format!("publish {id}"));
            self.helper_answers(0);
            told?;
            self.victim.tell(&format!("release {id}"))?;
        }
        Some(())
    }

    fn failing(&mut self, arm: &str) -> Option<()> {
        self.arm(arm);
        for id in [1, 2] {
            self.asleep_for(id)?;
            let told = self.victim.tell(&format!("fail {id}"));
            self.helper_answers(0);
            told?;
        }
        Some(())
    }

    /// The victim owns `id`, and a helper sleeps on it.
    fn asleep_for(&mut self, id: u64) -> Option<()> {
        self.victim.tell(&format!("get {id}"))?;
        let armed = self.stage.board().passed(Point::WaitArmed);
        self.helpers[0].say(&format!("load {id}"));
        let board = self.stage.board();
        self.stage.until("asleep", || board.passed(Point::WaitArmed) > armed);
        Some(())
    }

    fn waiting(&mut self, arm: &str) -> Option<()> {
        self.helpers[0].expect("get 1", "owner");
        self.arm(arm);
        let told = self.victim.tell("get 1").and_then(|_| self.victim.tell("wait 1 200"));
        self.helpers[0].expect("fill 1", "filled");
        self.helpers[0].expect("publish 1", "published");
        self.helpers[0].expect("release 1", "released");
        told?;
        Some(())
    }

    fn reaping(&mut self, arm: &str) -> Option<()> {
        leave_a_mess(&self.stage, 4, 10);
        leave_a_mess(&self.stage, 5, 30);
        self.arm(arm);
        self.victim.tell("reap")?;
        Some(())
    }

    /// The others go on, the victim's place is taken again, everybody leaves.
    pub fn go_on(mut self) {
        let successor = self.stage.rank(0);
        self.helpers.push(successor);
        for (seed, helper) in self.helpers.iter_mut().enumerate() {
            helper.say("reap");
            helper.say(&format!("loads 0 {PLAYED}"));
            self.crowd.iter().for_each(|id| helper.say(&format!("load {id}")));
            helper.say(&format!("hammer {seed} 64 100"));
            helper.say("leave");
        }
        let lines = 4 + self.crowd.len();
        for helper in &mut self.helpers {
            let answers: Vec<String> = (0..lines).map(|_| helper.hear()).collect();
            let errors = answers.iter().filter(|answer| answer.starts_with("error")).count();
            assert_eq!(errors, 0, "{answers:?}");
        }
        let Self { stage, victim, helpers, .. } = self;
        helpers.into_iter().for_each(Process::finish);
        drop(victim);
        stage.finish();
    }
}

pub fn bucket_count(stage: &Stage) -> u32 {
    let shape = stage.segment().plane().geometry().shape;
    Geometry::new(shape).expect("a valid shape").bucket_count
}

/// A rank dies with pins, two loads and an insertion in hand; it is not reaped.
pub fn leave_a_mess(stage: &Stage, rank: u32, first: u64) {
    let mut dying = stage.rank(rank);
    dying.expect(&format!("keep {first}"), "owner");
    dying.expect(&format!("keep {}", first + 1), "owner");
    dying.expect(&format!("get {}", first + 2), "owner");
    dying.expect(&format!("get {}", first + 3), "owner");
    dying.expect("crash-at InsertScanned 1 kill", "armed");
    dying.say(&format!("get {}", first + 4));
    dying.expect_death();
}
