//! What the analysis command has said about steps of rollouts, and when it is asked again.
// tidy: core

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use model::display::safe_text;
use rollouts::document::{Advice, Analysis};

/// An answer is asked for again when it is so old.
const AGAIN: Duration = Duration::from_secs(10);

/// An answer that is older counts for nothing.
const FRESH: Duration = Duration::from_secs(30);

/// The longest reason of the command that is shown, in bytes.
const WHY_BYTES_MAX: usize = 300;

/// The number of a rollout, and the id of a step of it.
pub type StepKey = (u64, String);

/// The last question about each step, and its answer.
#[derive(Debug, Default)]
pub struct Answers(BTreeMap<StepKey, Asked>);

#[derive(Debug)]
struct Asked {
    /// The question, as the command reads it.
    question: Vec<u8>,
    /// What the command has said, and when.
    answer: Option<(Analysis, Duration)>,
    is_running: bool,
}

impl Answers {
    /// Returns what the command has said to just this question, if that was lately; and true if it
    /// is to be called now. `now` counts from any moment.
    pub fn ask(
        &mut self,
        key: StepKey,
        question: &[u8],
        now: Duration,
    ) -> (Option<Analysis>, bool) {
        let asked = self.0.entry(key).or_insert_with(|| Asked::new(question));
        if asked.question != question {
            *asked = Asked::new(question);
        }
        let age = |at: &Duration| now.saturating_sub(*at);
        let is_due = asked.answer.as_ref().is_none_or(|(_, at)| age(at) >= AGAIN);
        let must_call = is_due && !asked.is_running;
        asked.is_running |= must_call;
        let fresh = asked.answer.as_ref().filter(|(_, at)| age(at) < FRESH);
        (fresh.map(|(answer, _)| answer.clone()), must_call)
    }

    /// Takes what the command has said to a question.
    pub fn answer(&mut self, key: &StepKey, question: &[u8], answer: Analysis, now: Duration) {
        if let Some(asked) = self.0.get_mut(key).filter(|asked| asked.question == question) {
            (asked.answer, asked.is_running) = (Some((answer, now)), false);
        }
    }

    /// Forgets the answers about other rollouts.
    pub fn retain(&mut self, unfinished: &BTreeSet<u64>) {
        self.0.retain(|(number, _), _| unfinished.contains(number));
    }
}

impl Asked {
    fn new(question: &[u8]) -> Self {
        Self { question: question.to_owned(), answer: None, is_running: false }
    }
}

/// Returns an answer that has the step wait.
#[must_use]
pub fn wait(why: impl Into<String>) -> Analysis {
    Analysis { advice: Advice::Wait, why: why.into() }
}

/// Reads what the command has printed. Without an answer the step waits.
#[must_use]
pub fn read(printed: &[u8]) -> Analysis {
    match serde_json::from_slice::<Analysis>(printed) {
        Ok(answer) => Analysis { why: safe_text(&answer.why, WHY_BYTES_MAX), ..answer },
        Err(error) => wait(format!("the analysis gives no answer: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_an_object_with_an_advice() {
        let said = |text: &str| {
            let Analysis { advice, why } = read(text.as_bytes());
            format!("{advice:?} {}", why.split(',').next().unwrap()).trim_end().to_owned()
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
            Wait the analysis gives no answer: unknown variant `perhaps`
            Wait the analysis gives no answer: EOF while parsing a value at line 1 column 0
        "#]]
        .assert_eq(&(lines.join("\n") + "\n"));
    }

    #[test]
    fn only_a_new_answer_to_just_the_question_counts() {
        let mut answers = Answers::default();
        let key = || (1, "web".to_owned());
        let at = Duration::from_secs;
        let go = || Analysis { advice: Advice::Go, why: String::new() };
        assert_eq!(answers.ask(key(), b"one", at(0)), (None, true));
        assert_eq!(answers.ask(key(), b"one", at(1)), (None, false), "it is running");
        answers.answer(&key(), b"one", go(), at(2));
        assert_eq!(answers.ask(key(), b"one", at(3)), (Some(go()), false));
        assert_eq!(answers.ask(key(), b"one", at(12)), (Some(go()), true), "it is asked again");
        assert_eq!(answers.ask(key(), b"one", at(31)), (Some(go()), false));
        assert_eq!(answers.ask(key(), b"one", at(32)), (None, false), "it is too old");
        // Other machines have been changed: a late answer about the former ones is dropped.
        assert_eq!(answers.ask(key(), b"two", at(33)), (None, true));
        answers.answer(&key(), b"one", go(), at(34));
        assert_eq!(answers.ask(key(), b"two", at(35)), (None, false));
        answers.answer(&key(), b"two", go(), at(36));
        assert_eq!(answers.ask(key(), b"two", at(3_600)), (None, true), "nobody asked for long");
        answers.retain(&BTreeSet::new());
        assert_eq!(answers.ask(key(), b"two", at(3_600)), (None, true));
    }
}
