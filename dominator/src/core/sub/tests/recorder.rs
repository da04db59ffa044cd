//! Commits are recorded before they are sent. They are not sent if that fails, or if another update
//! is wanted by then.
// tidy: core

use std::sync::Arc;

use api::subd::{Activity, Paused, UpdateOutcome};
use expect_test::expect;
use model::mdb::Machine;
use model::tree::Time;

use super::super::*;
use super::held::ready;
use super::script::{Script, image};

/// A machine that has staged the update with id 1, whose Commit is being recorded.
fn staged() -> Script {
    let mut script = ready();
    script.writes_ends = true;
    script.scan(&[]);
    script.poll();
    script.accept();
    script.reply.activity = Activity::Prepared { update_id: 1 };
    script.poll();
    script
}

/// The same for tests of the shell.
pub(crate) fn staged_sub() -> Sub {
    staged().sub
}

#[test]
fn an_update_that_cannot_be_recorded_is_not_ordered_and_has_not_failed() {
    let mut script = staged();
    script.step("full", Event::HistoryFailing(Some("no space left".into())));
    script.refuse(FailureKind::NotRecorded, "no space left");
    assert_eq!(
        script.sub.detail(),
        "1 change: /a (missing), all objects are there; the update cannot be recorded, and is not \
         ordered before it is: no space left"
    );
    // Nothing is ordered meanwhile, and the staged update expires, which is no failure.
    script.wait(300);
    script.ended(1, UpdateOutcome::NotPrepared("expired".into()), None);
    script.poll();
    script.reply.last_update = None;
    script.step("room", Event::HistoryFailing(None));
    script.accept();
    script.reply.activity = Activity::Prepared { update_id: 2 };
    script.poll();
    // Recording may fail before that is reported, and the update expire when there is space again.
    script.refuse(FailureKind::NotRecorded, "no space left");
    script.ended(2, UpdateOutcome::NotPrepared("expired".into()), None);
    script.poll();
    script.wait(60);
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   preparing        staging 1 change: /a (missing)
                     -> prepare 1: 1 operations
        0   accepted preparing        staging 1 change: /a (missing)
        0   polled   updating         carrying out 1 change: /a (missing)
                     -> commit 1
        0   full     updating         the update was ordered
        0   failed   updates-disabled 1 change: /a (missing), all objects are there; the
                     -> release: Withdrawn
        300 wake     updates-disabled 1 change: /a (missing), all objects are there; the
        300 polled   updates-disabled 1 change: /a (missing), all objects are there; the
        300 room     preparing        staging 1 change: /a (missing)
                     -> prepare 2: 1 operations
        300 accepted preparing        staging 1 change: /a (missing)
                     -> release: Withdrawn
        300 polled   updating         carrying out 1 change: /a (missing)
                     -> commit 2
        300 failed   preparing        staged 1 change: /a (missing); trying again, becau
                     -> release: Withdrawn
        300 polled   preparing        staging 1 change: /a (missing); trying again, beca
        360 wake     preparing        staging 1 change: /a (missing)
                     -> prepare 3: 1 operations
    "#]]);
}

#[test]
fn a_commit_that_was_recorded_is_sent_only_if_it_is_still_wanted() {
    type Change = fn(&mut Script);
    let assign: fn(&mut Script, Machine) = |script, machine| {
        let (machine, image) = (Arc::new(machine), script.image.clone());
        let planned = ImageState::Undefined;
        script.step("assigned", Event::Assigned { machine, image, planned, rollback: None });
    };
    let changes: [(&str, bool, Change); 9] = [
        ("nothing", true, |_| {}),
        ("polled", true, Script::poll),
        ("another image", false, |script| {
            script.image = image("other", &[("/a", "1")]);
            script.assign();
        }),
        ("no image", false, |script| {
            script.image = ImageState::Undefined;
            script.assign();
        }),
        ("another scan", false, |script| {
            script.scan(&[("/b", "1")]);
            script.poll();
        }),
        ("another instance", false, |script| {
            script.reply.version.instance += 1;
            script.poll();
        }),
        ("nothing staged", false, |script| {
            script.reply.activity = Activity::Idle;
            script.poll();
        }),
        ("paused", false, |script| {
            let until = Time { seconds: 1_700_000_000, nanoseconds: 0 };
            script.reply.paused = Some(Paused { until, reason: "moving".to_owned() });
            script.poll();
        }),
        ("silent", false, |script| {
            let failure = Failure { kind: FailureKind::Unreachable, text: "silent".to_owned() };
            script.wait(60);
            script.step("silent", Event::PollFailed(script.polled, failure));
        }),
    ];
    for (what, is_sent, change) in changes {
        let mut script = staged();
        change(&mut script);
        assert_eq!(script.sub.is_commit_wanted(1), is_sent, "{what}");
        assert!(!script.sub.is_commit_wanted(2), "{what}");
    }
    for (disable_updates, tags) in [(true, ""), (false, "a")] {
        let mut script = staged();
        let tags = [("role".to_owned(), tags.to_owned())].into();
        let machine = Machine::clone(&script.sub.machine);
        assign(&mut script, Machine { disable_updates, tags, ..machine });
        assert_eq!(script.sub.is_commit_wanted(1), !disable_updates);
    }
}
