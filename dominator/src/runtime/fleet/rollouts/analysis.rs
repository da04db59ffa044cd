//! Calls the analysis command of operators, which says whether the steps of rollouts go on.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use model::lock::locked;
use rollouts::document::Analysis;
use rollouts::view::Question;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::core::analysis::{Answers, StepKey, read, wait};
use crate::runtime::operator_program;

#[derive(Debug)]
pub(in crate::runtime::fleet) struct AnalysisService {
    /// The words of the command line; none without a command.
    program: Mutex<Vec<String>>,
    answers: Arc<Mutex<Answers>>,
    /// Times count from here.
    start: Instant,
    tracker: TaskTracker,
    stop: CancellationToken,
}

impl AnalysisService {
    /// Runs the command in `tracker` until `stop` is cancelled.
    pub(in crate::runtime::fleet) fn new(tracker: TaskTracker, stop: CancellationToken) -> Self {
        let (program, answers) = Default::default();
        Self { program, answers, start: Instant::now(), tracker, stop }
    }

    /// Sets the words of the command line.
    pub(in crate::runtime::fleet) fn set_program(&self, words: Vec<String>) {
        *locked(&self.program) = words;
    }

    /// Returns what the command says about the machines that a step has changed, if it has said
    /// something lately. Has it called if it is time.
    pub(super) fn ask(&self, question: &Question<'_>) -> Option<Analysis> {
        let program = locked(&self.program).clone();
        if program.is_empty() {
            return Some(wait("the dominator has no --analysis-command"));
        }
        let key = (question.number, question.step.to_owned());
        let line = operator_program::line(question);
        let (answer, must_call) =
            locked(&self.answers).ask(key.clone(), &line, self.start.elapsed());
        if must_call {
            self.call(program, key, line);
        }
        answer
    }

    fn call(&self, program: Vec<String>, key: StepKey, question: Vec<u8>) {
        let (answers, start) = (Arc::clone(&self.answers), self.start);
        let work = async move {
            let answer = match operator_program::call(&program, &question).await {
                Ok(printed) => read(&printed),
                Err(error) => {
                    tracing::error!(rollout = key.0, step = key.1, "the analysis fails: {error}");
                    wait(format!("the analysis fails: {error}"))
                }
            };
            locked(&answers).answer(&key, &question, answer, start.elapsed());
        };
        self.tracker.spawn(self.stop.clone().run_until_cancelled_owned(work));
    }

    /// Forgets the answers about other rollouts.
    pub(super) fn retain(&self, unfinished: &BTreeSet<u64>) {
        locked(&self.answers).retain(unfinished);
    }
}
