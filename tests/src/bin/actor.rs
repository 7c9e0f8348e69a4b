//! A process that acts on the lines of its standard input; see `ucm_tests::actor`.

use std::process::ExitCode;

use ucm_tests::actor::Actor;
use ucm_tests::setup::Place;

fn main() -> ExitCode {
    let Some(place) = Place::from_arguments(std::env::args().skip(1)) else {
        eprintln!("actor: started by the tests, not by hand");
        return ExitCode::from(2);
    };
    match Actor::new(place) {
        Ok(actor) => {
            actor.act();
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("actor: {error}");
            ExitCode::FAILURE
        }
    }
}
