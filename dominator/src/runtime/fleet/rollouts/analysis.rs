//! Asks the analysis command of operators whether the steps of rollouts go on.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use model::display::safe_text;
use model::lock::locked;
use rollouts::advance::Question;
use rollouts::document::{Advice, Analysis};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::runtime::operator_program;

/// An answer is asked for again when it is so old.
const AGAIN: Duration = Duration::from_secs(10);

/// An answer that is older counts for nothing.
const FRESH: Duration = Duration::from_secs(30);

/// The longest reason of the command that is shown, in bytes.
const WHY_BYTES_MAX: usize = 300;

/// What is known of the steps that wait for an answer.
#[derive(Debug)]
pub(in crate::runtime::fleet) struct AnalysisService {
    /// The words of the command line; none without a command.
    program: Mutex<Vec<String>>,
    /// By rollout and step.
    asked: Arc<Mutex<BTreeMap<(u64, String), Asked>>>,
    tracker: TaskTracker,
    stop: CancellationToken,
}

#[derive(Debug)]
struct Asked {
    /// The question, as the command reads it.
    question: Vec<u8>,
    /// What the command has said, and when.
    answer: Option<(Analysis, Instant)>,
    is_running: bool,
}

impl AnalysisService {
    /// Runs the command in `tracker` until `stop` is cancelled.
    pub(in crate::runtime::fleet) fn new(tracker: TaskTracker, stop: CancellationToken) -> Self {
        Self { program: Mutex::default(), asked: Arc::default(), tracker, stop }
    }

    /// Sets the words of the command line.
    pub(in crate::runtime::fleet) fn set_program(&self, words: Vec<String>) {
        *locked(&self.program) = words;
    }

    /// Returns what the command says about the machines that a step has changed, if it has said
    /// something. Has it called if that was not said lately.
    pub(super) fn ask(&self, question: &Question<'_>) -> Option<Analysis> {
        let program = locked(&self.program).clone();
        if program.is_empty() {
            return Some(wait("the dominator has no --analysis-command".to_owned()));
        }
        let key = (question.number, question.step.to_owned());
        let line = operator_program::line(question);
        let mut all = locked(&self.asked);
        let same = all.remove(&key).filter(|asked| asked.question == line);
        let mut asked = same.unwrap_or(Asked { question: line, answer: None, is_running: false });
        let age = asked.answer.as_ref().map(|(_, at)| at.elapsed());
        if !asked.is_running && age.is_none_or(|age| age >= AGAIN) {
            asked.is_running = true;
            self.call(program, asked.question.clone(), key.clone());
        }
        let fresh = asked.answer.as_ref().filter(|(_, at)| at.elapsed() < FRESH);
        let answer = fresh.map(|(answer, _)| answer.clone());
        all.insert(key, asked);
        answer
    }

    fn call(&self, program: Vec<String>, question: Vec<u8>, key: (u64, String)) {
        let asked = Arc::clone(&self.asked);
        let work = async move {
            let printed = operator_program::call(&program, &question).await;
            let answer = printed.and_then(|printed| read(&printed)).unwrap_or_else(|error| {
                tracing::error!(rollout = key.0, step = key.1, "the analysis fails: {error}");
                wait(format!("the analysis fails: {error}"))
            });
            let mut asked = locked(&asked);
            if let Some(asked) = asked.get_mut(&key).filter(|asked| asked.question == question) {
                (asked.answer, asked.is_running) = (Some((answer, Instant::now())), false);
            }
        };
        self.tracker.spawn(self.stop.clone().run_until_cancelled_owned(work));
    }

    /// Forgets the answers about other rollouts.
    pub(super) fn retain(&self, unfinished: &BTreeSet<u64>) {
        locked(&self.asked).retain(|(number, _), _| unfinished.contains(number));
    }
}

fn wait(why: String) -> Analysis {
    Analysis { advice: Advice::Wait, why }
}

/// Reads what the command has printed.
fn read(printed: &[u8]) -> Result<Analysis, String> {
    let answer: Result<Analysis, _> = serde_json::from_slice(printed);
    let answer = answer.map_err(|error| format!("its answer is not as it should be: {error}"))?;
    Ok(Analysis { why: safe_text(&answer.why, WHY_BYTES_MAX), ..answer })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_an_object_with_an_advice() {
        let said = |text: &str| match read(text.as_bytes()) {
            Ok(Analysis { advice, why }) => format!("{advice:?} {why}"),
            Err(error) => error.split(',').next().unwrap().to_owned(),
        };
        let long = format!(r#"{{"advice": "go", "why": "{}"}}"#, "x".repeat(1_000));
        assert_eq!(said(&long).len(), "Go ".len() + WHY_BYTES_MAX + " ...".len());
        let lines = [
            said(r#"{"advice": "roll_back", "why": "2 %\u0007"}"#),
            said(r#"{"advice": "go"}"#),
            said(r#"{"advice": "perhaps"}"#),
            said(""),
        ];
        expect_test::expect![[r#"
            RollBack 2 % 
            Go 
            its answer is not as it should be: unknown variant `perhaps`
            its answer is not as it should be: EOF while parsing a value at line 1 column 0
        "#]]
        .assert_eq(&(lines.join("\n") + "\n"));
    }
}
