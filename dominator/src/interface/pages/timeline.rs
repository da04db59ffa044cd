//! The page of what rollouts did when.

use ::rollouts::document::{Step, name_of};
use ::rollouts::state::{RolloutRecord, State};
use api::fault::{Fault, FaultCode};
use model::display::{rough_duration, utc};
use model::tree::Time;
use rpc::page_frame::{Cell, table};
use rpc::server::{Page, Query};
use system::clock::wall;

use super::Pages;
use super::rollouts::{link, paragraph};

/// How many days are shown, if the reader does not say.
const DAYS: i64 = 7;

/// The most days that are shown.
const DAYS_MAX: i64 = 3_660;

/// The length of the bars, in characters.
const BAR: i64 = 40;

/// What steps did in the last days.
pub(super) fn page(pages: &Pages, query: &Query) -> Result<Page, Fault> {
    let days = match query.get("days").map(str::parse) {
        None => DAYS,
        Some(Ok(days)) if (1..=DAYS_MAX).contains(&days) => days,
        Some(_) => {
            let text = format!("days is a number from 1 to {DAYS_MAX}");
            return Err(Fault::new(FaultCode::BadRequest, text));
        }
    };
    let now = wall();
    let from = Time { seconds: now.seconds - days * 86_400, ..now };
    let rows = rows(&pages.fleet.rollout_state(), from, now);
    let bar = format!("from {} until now", utc(from));
    let headings = ["rollout", "step", "state", "began", "ended", "lasted", &bar];
    let cells: Vec<Vec<Cell>> = rows.into_iter().map(Row::cells).collect();
    let body = match cells.is_empty() {
        true => paragraph(&format!("No rollout did anything in the last {days} days.")),
        false => table(&headings, &cells),
    };
    Ok(Page::Html(pages.frame.render("Timeline", &body)))
}

/// A step that was on machines.
#[derive(Debug, PartialEq, Eq)]
struct Row {
    rollout: String,
    step: String,
    state: String,
    began: Time,
    /// `None` while it goes on.
    ended: Option<Time>,
    lasted: String,
    bar: String,
}

impl Row {
    fn cells(self) -> Vec<Cell> {
        let Self { rollout, step, state, began, ended, lasted, bar } = self;
        let ended = ended.map(utc).unwrap_or_default();
        let texts = [step, state, utc(began), ended, lasted, bar].map(Cell::Text);
        [link("/rollouts/", &rollout)].into_iter().chain(texts).collect()
    }
}

/// Returns the steps that were on machines between `from` and `now`, the one that began last first.
fn rows(state: &State, from: Time, now: Time) -> Vec<Row> {
    let steps = state
        .rollouts
        .values()
        .flat_map(|record| record.rollout.steps.iter().map(move |step| (&**record, step)));
    let rows = steps.filter_map(|(record, step)| row(record, step, from, now));
    let mut rows: Vec<Row> = rows.collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.began));
    rows
}

fn row(record: &RolloutRecord, step: &Step, from: Time, now: Time) -> Option<Row> {
    let began = *record.began.get(&step.id)?;
    let ended = record.since.get(&step.id).copied().filter(|_| step.state.is_finished());
    let end = ended.unwrap_or(now);
    let all = now.seconds - from.seconds;
    if end < from || all <= 0 {
        return None;
    }
    let at = |time: Time| ((time.seconds - from.seconds) * BAR / all).clamp(0, BAR - 1);
    let mark = |number| if (at(began)..=at(end)).contains(&number) { '█' } else { '·' };
    let lasted = u64::try_from(end.seconds - began.seconds).unwrap_or_default();
    Some(Row {
        rollout: record.rollout.id.clone(),
        step: step.id.clone(),
        state: name_of(&step.state),
        began,
        ended,
        lasted: rough_duration(lasted),
        bar: (0..BAR).map(mark).collect(),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ::rollouts::document::{Rollout, StepState};

    use super::*;

    #[test]
    fn steps_are_shown_where_they_were_on_machines() {
        let at = |seconds| Time { seconds, nanoseconds: 0 };
        let mut state = State::default();
        let mut add = |number: u64, step: StepState, began: Option<i64>, since: i64| {
            let steps = vec![Step { id: "web".to_owned(), state: step, ..Step::default() }];
            let rollout = Rollout { id: format!("r{number}"), steps, ..Rollout::default() };
            let began = began.map(|began| ("web".to_owned(), at(began)));
            let since = [("web".to_owned(), at(since))].into();
            let record = RolloutRecord { number, rollout, since, ..RolloutRecord::default() };
            let record = RolloutRecord { began: began.into_iter().collect(), ..record };
            state.rollouts.insert(number, Arc::new(record));
        };
        add(1, StepState::Succeeded, Some(100), 900);
        add(2, StepState::Succeeded, Some(900), 1_500);
        add(3, StepState::Failed, Some(2_000), 2_000);
        add(4, StepState::AwaitingApproval, None, 2_500);
        add(5, StepState::Applying, Some(2_900), 2_900);
        let line =
            |row: &Row| format!("{} {} {} {}\n", row.rollout, row.state, row.lasted, row.bar);
        let lines: String = rows(&state, at(1_000), at(5_000)).iter().map(line).collect();
        expect_test::expect![[r#"
            r5 applying 35 min ···················█████████████████████
            r3 failed 0 s ··········█·····························
            r2 succeeded 10 min ██████··································
        "#]]
        .assert_eq(&lines);
    }
}
