//! Every kind of tampering is found, and what a crash leaves is not taken for one.

use proptest::prelude::*;

use super::call_details::{ARGUMENTS_BYTES_MAX, CallDetails, escape_and_cut};
use super::quota::{
    OTHERS, PER_MINUTE, Quota, STRANGERS, STRANGERS_PER_MINUTE, USERS_MAX, Unrecorded,
};
use super::record::*;
use super::verify::*;
use model::tree::Time;

fn decided(number: u64) -> AuditEvent {
    let (decision, arguments) = ("expire-image".to_owned(), format!("image=web/{number}"));
    AuditEvent::Decided { decision, arguments, why: String::new() }
}

/// The files of a log, each as lines.
type Files = Vec<Vec<String>>;

/// A log of files with so many records each, the line that begins a file not counted.
fn log(counts: &[u64]) -> Files {
    let mut chain = Chain::new("testd", None);
    let at = |seconds: u64| Time { seconds: seconds.cast_signed(), nanoseconds: 5_000 };
    let mut number = 0;
    let mut file = |(index, count): (usize, &u64)| {
        let mut lines = vec![chain.append(at(number), AuditEvent::File { file: index as u64 + 1 })];
        for _ in 0..*count {
            number += 1;
            lines.push(chain.append(at(number), decided(number)));
        }
        lines
    };
    counts.iter().enumerate().map(&mut file).collect()
}

fn verify(files: &Files, expected: &[&str]) -> ChainReport {
    let expected = expected.iter().map(|text| text.parse().unwrap()).collect();
    let mut verifier = Verifier::new(expected);
    for (index, lines) in files.iter().enumerate() {
        verifier.file(&format!("log.{}", index + 1));
        let bytes = lines.concat().into_bytes();
        bytes.split_inclusive(|byte| *byte == b'\n').for_each(|line| verifier.line(line));
    }
    verifier.finish()
}

/// What is wrong, one line each.
fn troubles(files: &Files) -> Vec<String> {
    verify(files, &[]).troubles.iter().map(ToString::to_string).collect()
}

fn head_of(line: &str) -> ChainHead {
    check_line(line.trim_end().as_bytes()).unwrap().head
}

/// Writes all records from this one on anew, as somebody can who knows the form.
fn rewrite(files: &mut Files, from: u64, change: impl Fn(&mut AuditEvent)) {
    let mut chain: Option<Chain> = None;
    let mut before = None;
    for line in files.iter_mut().flatten() {
        let sealed = check_line(line.trim_end().as_bytes()).unwrap();
        let sequence = sealed.head.sequence;
        if sequence >= from {
            let chain = chain.get_or_insert_with(|| Chain::new("testd", before));
            let mut event = sealed.record.unwrap().event;
            if sequence == from {
                change(&mut event);
            }
            *line = chain.append(Time { seconds: 1, nanoseconds: 0 }, event);
        }
        before = Some(head_of(line));
    }
}

#[test]
fn a_record_is_a_line_of_json_that_anybody_can_hash() {
    let mut chain = Chain::new("imageserver", None);
    let time = Time { seconds: 1_700_000_000, nanoseconds: 123_456_789 };
    let act = AuditedCall {
        user: Some("alice".to_owned()),
        groups: "web".to_owned(),
        address: "10.0.0.7:41234".to_owned(),
        method: "ImageServer.DeleteImage".to_owned(),
        arguments: "image=web/7".to_owned(),
        why: "old".to_owned(),
        who: String::new(),
    };
    let lines = chain.append(time, AuditEvent::Begun(act))
        + &chain.append(
            time,
            AuditEvent::Ended {
                of: 1,
                method: "ImageServer.DeleteImage".to_owned(),
                outcome: CallOutcome::Failed,
                text: "it is in use".to_owned(),
            },
        );
    expect_test::expect_file!["tests/records.jsonl"].assert_eq(&lines);
}

#[test]
fn every_record_can_be_read_again() {
    let act = AuditedCall { user: Some("\u{202e}\"\\".to_owned()), ..AuditedCall::default() };
    let events = [
        AuditEvent::File { file: 1 },
        AuditEvent::Started { version: "0.1.0".to_owned() },
        AuditEvent::Torn { bytes: 3, digest: Hash::of(b"abc"), text: "abc".to_owned() },
        AuditEvent::Begun(act.clone()),
        AuditEvent::Ended {
            of: 4,
            method: "A.B".to_owned(),
            outcome: CallOutcome::Left,
            text: "x".to_owned(),
        },
        AuditEvent::Denied { act, text: "no".to_owned() },
        AuditEvent::DeniedMore { caller: "10.0.0.1".to_owned(), count: 512 },
        decided(1),
        AuditEvent::Missed { count: 2, text: "no space".to_owned() },
    ];
    let mut chain = Chain::new("testd", None);
    for event in events {
        let line = chain.append(Time { seconds: 0, nanoseconds: 0 }, event.clone());
        let sealed = check_line(line.trim_end().as_bytes()).unwrap();
        assert_eq!(Some(sealed.head), chain.head());
        assert_eq!(sealed.record.unwrap().event, event);
    }
}

#[test]
fn a_whole_log_is_whole() {
    let files = log(&[2, 0, 3]);
    let head = head_of(files[2].last().unwrap());
    let expected = ChainReport {
        files: 3,
        records: 8,
        first: Some(1),
        head: Some(head),
        ..ChainReport::default()
    };
    let remembered = head_of(&files[0][1]).to_string();
    assert_eq!(verify(&files, &[&remembered, &head.to_string()[..15]]), expected);
    assert_eq!(verify(&Vec::new(), &[]), ChainReport::default());
}

#[test]
fn every_kind_of_tampering_is_found() {
    type Tamper = fn(&mut Files);
    #[rustfmt::skip]
    let table: [(&str, Tamper, &[&str]); 16] = [
        ("a byte is changed", |files| files[0][2] = files[0][2].replace("web/2", "web/3"),
            &["log.1, line 3, record 3: it was changed: its hash is another one"]),
        ("a time is changed", |files| files[0][2] = files[0][2].replace("1970-", "1971-"),
            &["log.1, line 3, record 3: it was changed: its hash is another one"]),
        ("a space is added", |files| files[0][2] = files[0][2].replace("{\"seq", "{ \"seq"),
            &["log.1, line 3, record 3: it was changed: its hash is another one"]),
        ("a record is written anew", |files| {
            let mut chain = Chain::new("testd", Some(head_of(&files[0][1])));
            files[0][2] = chain.append(Time { seconds: 9, nanoseconds: 0 }, decided(9));
        }, &["log.1, line 4, record 4: the record before it is not the one that it was written \
              after"]),
        ("a line is removed", |files| drop(files[0].remove(2)),
            &["log.1, line 3, record 4: record 3 is missing before it"]),
        ("lines are removed", |files| drop(files[0].drain(2..4)),
            &["log.1, line 3, record 5: records 3 to 4 are missing before it"]),
        ("lines are swapped", |files| files[0].swap(2, 3), &[
            "log.1, line 3, record 4: record 3 is missing before it",
            "log.1, line 4, record 3: it stands behind record 4: it was moved, added or repeated",
            "log.1, line 5, record 5: record 4 is missing before it",
        ]),
        ("a line is repeated", |files| { let line = files[0][2].clone(); files[0].insert(3, line) },
            &["log.1, line 4, record 3: it stands behind record 3: it was moved, added or \
               repeated"]),
        ("a record is added", |files| {
            let mut chain = Chain::new("testd", Some(head_of(&files[0][2])));
            let line = chain.append(Time { seconds: 9, nanoseconds: 0 }, decided(9));
            files[0].insert(3, line);
        }, &["log.1, line 5, record 4: it stands behind record 4: it was moved, added or \
              repeated"]),
        ("a foreign line is added", |files| files[0].insert(2, "hello\n".to_owned()),
            &["log.1, line 3: it is no whole record"]),
        ("the first line is removed", |files| drop(files[1].remove(0)), &[
            "log.2, line 1, record 7: the file does not begin with the line that begins files: \
             what was before it is missing",
            "log.2, line 1, record 7: record 6 is missing before it",
        ]),
        ("the end of a file is cut", |files| files[0].truncate(4),
            &["log.2, line 1, record 6: record 5 is missing before it"]),
        ("a file is removed", |files| drop(files.remove(1)),
            &["log.2, line 1, record 9: records 6 to 8 are missing before it"]),
        ("files are swapped", |files| files.swap(0, 1), &[
            "log.2, line 1, record 1: it stands behind record 8: it was moved, added or repeated",
            "log.3, line 1, record 9: records 6 to 8 are missing before it",
        ]),
        ("a file is emptied", |files| files[1].clear(), &[
            "log.2: the file is empty",
            "log.3, line 1, record 9: records 6 to 8 are missing before it",
        ]),
        ("files are joined", |files| { let next = files.remove(1); files[0].extend(next) },
            &["log.1, line 6, record 6: another file begins here, within this one"]),
    ];
    for (name, tamper, expected) in table {
        let mut files = log(&[4, 2, 1]);
        tamper(&mut files);
        assert_eq!(troubles(&files), expected, "{name}");
    }
}

#[test]
fn what_a_chain_cannot_tell_a_remembered_head_does() {
    let whole = log(&[3, 2]);
    let remembered = head_of(&whole[1][1]).to_string();
    assert!(remembered.starts_with("6:"));
    let text = |files: &Files| {
        let report = verify(files, &[&remembered]);
        report.troubles.iter().map(ToString::to_string).collect::<Vec<_>>()
    };

    let mut cut = whole.clone();
    cut[1].truncate(1);
    assert_eq!(troubles(&cut), [""; 0]);
    let expected = format!(
        "log.2: the log ends before record {remembered} that was remembered: its end was cut off"
    );
    assert_eq!(text(&cut), [expected]);

    let mut anew = whole.clone();
    rewrite(&mut anew, 3, |event| *event = decided(99));
    assert_eq!(troubles(&anew), [""; 0]);
    let expected = format!(
        "log.2, line 2, record 6: it is not the record that was remembered as {remembered}: the \
         log was written anew"
    );
    assert_eq!(text(&anew), [expected]);

    let mut chain = Chain::new("testd", Some(head_of(&whole[1][2])));
    let later =
        vec![chain.append(Time { seconds: 9, nanoseconds: 0 }, AuditEvent::File { file: 3 })];
    let expected =
        format!("log.1: record {remembered} that was remembered is older than these files");
    assert_eq!(text(&vec![later]), [expected]);
    assert!(text(&whole).is_empty());
    for bad in ["6", "6:", "6:0123", "x:0123456789ab", "6:0123456789ag"] {
        assert!(bad.parse::<ExpectedHead>().is_err(), "{bad}");
    }
}

#[test]
fn what_a_crash_leaves_is_a_remark() {
    let remarks = |files: &Files| {
        let report = verify(files, &[]);
        let remarks: Vec<String> = report.remarks.iter().map(ToString::to_string).collect();
        (remarks, report.troubles.iter().map(ToString::to_string).collect::<Vec<_>>())
    };
    let mut files = log(&[2]);
    let mut chain = Chain::new("testd", Some(head_of(&files[0][2])));
    let torn = "{\"sequence\":4,\"ti";
    files[0].push(torn.to_owned());
    let unfinished = "log.1, line 4: the last line is not whole: it is being written, or a crash \
                      cut it off";
    assert_eq!(remarks(&files), (vec![unfinished.to_owned()], vec![]));

    files[0][3].push('\n');
    let digest = Hash::of(files[0][3].as_bytes());
    let bytes = files[0][3].len() as u64;
    let event = AuditEvent::Torn { bytes, digest, text: torn.to_owned() };
    files[0].push(chain.append(Time { seconds: 9, nanoseconds: 0 }, event));
    let told = "log.1, line 5, record 4: the 18 bytes before it are no record, as a crash leaves \
                them: the daemon found them so when it started";
    assert_eq!(remarks(&files), (vec![told.to_owned()], vec![]));

    // What is not what the daemon found, or was a whole record, is trouble.
    files[0][3] = files[0][3].replace('4', "5");
    assert_eq!(remarks(&files), (vec![], vec!["log.1, line 4: it is no whole record".to_owned()]));

    let mut begun = log(&[2, 2]);
    begun.remove(0);
    let begins = "log.1, line 1, record 4: the records before it are in files that are not here, \
                  as when they were too old";
    assert_eq!(remarks(&begun), (vec![begins.to_owned()], vec![]));
}

#[test]
fn texts_of_callers_are_harmless_and_short() {
    let brief = CallDetails::default()
        .with("host", "web 1")
        .with("image", "a\nb\u{1b}[2J\u{202e}")
        .with("empty", "")
        .with("name", "a\" force=\"true")
        .with_some("none", None::<u8>)
        .with_list("hosts", ["a", "b"])
        .with_list("ids", 1..=9)
        .why("it's \"meant\"\t")
        .who("alice");
    let expected = "host=\"web 1\" image=\"a\\nb\\u{1b}[2J\\u{202e}\" empty=\"\" \
                    name=\"a\\\" force=\\\"true\" hosts=a,b ids=\"1,2,3,4,5,... (9 in all)\"";
    assert_eq!(brief.arguments, expected);
    assert_eq!((brief.why.as_str(), brief.who.as_str()), ("it's \"meant\"\\t", "alice"));
    let long = CallDetails::default().with("a", "ü".repeat(10_000)).with("b", 1);
    assert!(long.arguments.len() <= ARGUMENTS_BYTES_MAX && long.arguments.ends_with(" ..."));
    assert_eq!(escape_and_cut("Zürich and more", 7), "Zü ...");
}

#[test]
fn refusals_beyond_a_few_are_counted() {
    let more = |caller: &str, count| Unrecorded { caller: caller.to_owned(), count };
    let mut quota = Quota::default();
    assert_eq!(quota.tick(1), []);
    let mallory = Some("mallory");
    let recorded = (0..PER_MINUTE + 512).filter(|_| quota.admit(mallory)).count();
    assert_eq!(recorded as u32, PER_MINUTE);
    let bob = Some("bob");
    assert!(quota.admit(bob) && quota.is_exhausted(mallory) && !quota.is_exhausted(bob));
    assert_eq!(quota.tick(1), []);
    assert_eq!(quota.tick(2), [more("mallory", 512)]);
    assert!(!quota.is_exhausted(mallory) && quota.admit(mallory));

    // Many users, and those who have no name, of whom a network has any number.
    let mut quota = Quota::default();
    let users = (0..10_000).filter(|number| quota.admit(Some(&number.to_string()))).count();
    assert_eq!(users, USERS_MAX + PER_MINUTE as usize);
    assert!(quota.is_exhausted(Some("never seen")) && !quota.is_exhausted(Some("7")));
    assert!(!quota.is_exhausted(None));
    let strangers = (0..10_000).filter(|_| quota.admit(None)).count();
    assert_eq!(strangers as u32, STRANGERS_PER_MINUTE);
    assert!(quota.is_exhausted(None) && !quota.is_exhausted(Some("7")));
    let told =
        [more(OTHERS, 10_000 - users as u32), more(STRANGERS, 10_000 - STRANGERS_PER_MINUTE)];
    assert_eq!(quota.tick(9), told);
}

proptest! {
    /// Whatever is done to the bytes of a log, either they are the same in the end, or it is found
    /// against the head that was remembered.
    #[test]
    fn no_change_of_bytes_is_missed(
        counts in prop::collection::vec(0u64..4, 1..4),
        file in any::<prop::sample::Index>(),
        at in any::<prop::sample::Index>(),
        length in 0usize..400,
        bytes in prop::collection::vec(any::<u8>(), 0..4),
    ) {
        let files = log(&counts);
        let head = head_of(files.last().unwrap().last().unwrap()).to_string();
        let whole: Vec<Vec<u8>> = files.iter().map(|lines| lines.concat().into_bytes()).collect();
        let mut changed = whole.clone();
        let file = file.get_mut(&mut changed);
        let at = at.index(file.len());
        let end = (at + length).min(file.len());
        file.splice(at..end, bytes);
        let mut verifier = Verifier::new(vec![head.parse().unwrap()]);
        for (index, bytes) in changed.iter().enumerate() {
            verifier.file(&index.to_string());
            bytes.split_inclusive(|byte| *byte == b'\n').for_each(|line| verifier.line(line));
        }
        let report = verifier.finish();
        prop_assert_eq!(report.is_whole(), changed == whole, "{:?}", report);
    }
}
