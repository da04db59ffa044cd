//! What is asked for and when, and which content is used.

mod gates;
mod rollout;

use api::file_generator::{FILES_MAX, Generator};

use super::ended_certificates::NoCertificate;
use super::questions::VALID_SHORTEST;
use super::rollout::{ContentReport, Standing};
use super::*;

const SOURCE: &str = "files:6972";

fn now(seconds: u64) -> Now {
    let wall = Time { seconds: 1_000 + seconds.cast_signed(), nanoseconds: 0 };
    Now { elapsed: Duration::from_secs(seconds), wall }
}

fn machine(hostname: &str, location: &str) -> Arc<Machine> {
    let (hostname, location) = (hostname.to_owned(), location.to_owned());
    Arc::new(Machine { hostname, location, ..Machine::default() })
}

fn rules(paths: &[&str]) -> Vec<ComputedRule> {
    let rule =
        |path: &&str| ComputedRule { path: path.parse().unwrap(), source: SOURCE.to_owned() };
    paths.iter().map(rule).collect()
}

fn id(text: &str) -> ObjectId {
    Algorithm::Blake3.digest(text.as_bytes())
}

/// How the server numbers its revisions.
const NUMBERING: u64 = 1;

/// The generators of a server: path, version, and the revision since which it has that.
fn generators(revision: u64, all: &[(&str, &str, u64)]) -> Generators {
    let generator = |(path, version, revision): &(&str, &str, u64)| Generator {
        path: path.parse().unwrap(),
        kind: "template".to_owned(),
        version: id(version),
        is_secret: false,
        revision: *revision,
        resources: Vec::new(),
    };
    let generators = all.iter().map(generator).collect();
    Generators { generators, numbering: NUMBERING, revision, ..Generators::default() }
}

/// A table, and the questions that it asks as text.
struct Asked(ComputedTable);

impl Asked {
    fn want(&mut self, hostname: &str, location: &str, paths: &[&str], at: u64) {
        self.want_with(hostname, location, (Algorithm::Blake3, paths), at);
    }

    fn want_with(
        &mut self,
        hostname: &str,
        location: &str,
        (algorithm, paths): (Algorithm, &[&str]),
        at: u64,
    ) {
        let (machine, rules) = (machine(hostname, location), rules(paths));
        let image = WantedImage { digest: id("image"), algorithm, rules: &rules };
        self.0.want(&machine, image, now(at));
    }

    /// Takes that all machines are in sync with what they were told.
    fn in_sync(&mut self, at: u64) {
        let hostnames: Vec<String> = self.0.machines.keys().cloned().collect();
        for hostname in hostnames {
            let round = self.0.known(&hostname).round;
            self.0.report(&hostname, round, ContentReport::Is(Standing::InSync), now(at));
        }
    }

    fn set_generators(&mut self, all: &Generators, at: u64) {
        self.0.take_generators(SOURCE, Some(all), now(at));
    }

    /// Asks, and answers each path by its content; `None` fails.
    fn answer(
        &mut self,
        at: u64,
        valid: u64,
        content: impl Fn(&str, &Machine) -> Option<String>,
    ) -> Vec<String> {
        let Some(batch) = self.0.next_batch(&SOURCE.into(), now(at)) else { return Vec::new() };
        let mut asked = Vec::new();
        let mut answers = Vec::new();
        for (wanted, record) in batch.request.machines.iter().zip(&batch.records) {
            let made = wanted.paths.iter().map(|path| {
                asked.push(format!("{} of {}", path, wanted.machine.hostname));
                let made = content(&path.to_string(), &wanted.machine);
                let made = made.ok_or_else(|| Arc::from("it failed"))?;
                let content = GeneratedContent {
                    id: id(&made),
                    size_bytes: 0,
                    valid_until_seconds: if valid == 0 { 0 } else { 1_000 + at + valid },
                    generator: id(&path.to_string()),
                    is_secret: false,
                };
                Ok(KnownContent::new(&content, *record, 9, Time::default()))
            });
            answers.push(made.collect());
        }
        self.0.take(&batch, answers, now(at), 500);
        asked
    }

    fn known(&self, hostname: &str) -> Vec<(String, ObjectId)> {
        let known = self.0.known(hostname);
        known.files.iter().map(|file| (file.rule.path.to_string(), file.object.id())).collect()
    }

    fn unknown(&self, hostname: &str) -> Vec<(String, String)> {
        let known = self.0.known(hostname);
        known.unknown.iter().map(|one| (one.rule.path.to_string(), one.why.to_string())).collect()
    }

    fn changed(&mut self) -> Vec<String> {
        self.0.take_changed().into_iter().collect()
    }
}

fn by_location(path: &str, machine: &Machine) -> Option<String> {
    Some(format!("{path} in {}", machine.location))
}

#[test]
fn files_are_asked_for_once_and_again_when_record_generator_or_time_make_others() {
    let mut asked = Asked(ComputedTable::default());
    asked.want("a", "nyc", &["/x", "/y"], 0);
    asked.want("b", "nyc", &["/x"], 0);
    assert_eq!(asked.answer(0, 600, by_location), ["/x of a", "/y of a", "/x of b"]);
    assert_eq!(asked.changed(), ["a", "b"]);
    asked.in_sync(0);
    assert_eq!(asked.answer(1, 600, by_location), [""; 0]);
    assert_eq!(
        asked.known("a"),
        [("/x".to_owned(), id("/x in nyc")), ("/y".to_owned(), id("/y in nyc"))]
    );

    // Another record.
    asked.want("b", "sfo", &["/x"], 10);
    asked.in_sync(10);
    assert_eq!(asked.answer(10, 600, by_location), ["/x of b"]);
    assert_eq!(asked.known("b"), [("/x".to_owned(), id("/x in nyc"))]);
    asked.0.advance(now(10));
    assert_eq!(asked.known("b"), [("/x".to_owned(), id("/x in sfo"))]);
    assert_eq!(asked.changed(), ["b"]);

    // The generators: first those that made the content, then another version of one of them.
    let versions = |x| generators(1, &[("/x", x, 1), ("/y", "/y", 1)]);
    asked.set_generators(&versions("/x"), 20);
    assert_eq!(asked.answer(20, 600, by_location), [""; 0]);
    asked.set_generators(&versions("new"), 30);
    assert_eq!(asked.answer(30, 600, by_location), ["/x of a", "/x of b"]);
    // The content is the same as before, and is that of now.
    assert_eq!(asked.changed(), ["a", "b"]);
    asked.set_generators(&versions("/x"), 40);

    // The end of what was made at 0, and then of the rest.
    assert_eq!(asked.0.ask_at(SOURCE), Some(Duration::from_secs(600)));
    assert_eq!(asked.answer(600, 0, by_location), ["/y of a"]);
    assert_eq!(asked.answer(630, 0, by_location), ["/x of a", "/x of b"]);
    assert_eq!(asked.0.ask_at(SOURCE), None);

    // What is wanted no more, and a machine that is gone.
    asked.want("a", "nyc", &["/y"], 700);
    assert_eq!(asked.known("a"), [("/y".to_owned(), id("/y in nyc"))]);
    asked.0.forget("b");
    assert_eq!(asked.0.needed(), (["a".to_owned()].into(), [id("/y in nyc")].into()));
}

#[test]
fn a_failure_keeps_what_is_known_and_is_repeated_with_growing_pauses() {
    let mut asked = Asked(ComputedTable::default());
    asked.want("a", "nyc", &["/x", "/y"], 0);
    let only_x =
        |path: &str, machine: &Machine| by_location(path, machine).filter(|_| path == "/x");
    assert_eq!(asked.answer(0, 100, only_x), ["/x of a", "/y of a"]);
    assert_eq!(asked.unknown("a"), [("/y".to_owned(), "it failed".to_owned())]);
    let mut repeated = Vec::new();
    for at in 1..100 {
        let mut again = asked.answer(at, 100, only_x);
        repeated.extend(again.drain(..).map(|path| (at, path)));
    }
    let times: Vec<u64> = repeated.iter().map(|(at, _)| *at).collect();
    assert_eq!(times, [1, 3, 7, 15, 31, 63]);
    assert_eq!(asked.0.troubles(now(99).wall), BTreeMap::new());

    // Then everything fails; what is known stays in use, and is reported.
    let never = |_: &str, _: &Machine| None;
    assert_eq!(asked.answer(100, 100, never), ["/x of a"]);
    assert_eq!(asked.known("a"), [("/x".to_owned(), id("/x in nyc"))]);
    let trouble = "/x of a: it failed".to_owned();
    assert_eq!(asked.0.troubles(now(100).wall), [(SOURCE, trouble)].into());
    asked.changed();
    assert_eq!(asked.answer(200, 100, by_location), ["/x of a", "/y of a"]);
    assert_eq!(asked.0.troubles(now(200).wall), BTreeMap::new());
    assert_eq!(asked.changed(), ["a"]);
    // Content past its end that is not asked for, such as because the server is away.
    let Some(_batch) = asked.0.next_batch(&SOURCE.into(), now(300)) else { panic!("it is due") };
    let text = "/x of a: it is past its end; and 1 more files".to_owned();
    assert_eq!(asked.0.troubles(now(361).wall), [(SOURCE, text)].into());
}

#[test]
fn a_server_that_tells_nothing_twice_is_in_trouble_until_it_tells() {
    let mut table = ComputedTable::default();
    let wall = now(0).wall;
    assert_eq!(table.could_not_ask(SOURCE, "it is off".to_owned()), 1);
    assert_eq!(table.troubles(wall), BTreeMap::new());
    assert_eq!(table.could_not_ask(SOURCE, "it is still off".to_owned()), 2);
    assert_eq!(table.troubles(wall), [(SOURCE, "it is still off".to_owned())].into());
    table.take_generators(SOURCE, None, now(9));
    assert_eq!(table.troubles(wall), BTreeMap::new());
    assert_eq!(table.could_not_ask(SOURCE, "it is off again".to_owned()), 1);
}

#[test]
fn after_a_restart_only_what_changed_is_asked_for() {
    let mut asked = Asked(ComputedTable::default());
    asked.want("a", "nyc", &["/x"], 0);
    asked.want("b", "nyc", &["/x"], 0);
    asked.answer(0, 600, by_location);
    let stored = ["a", "b"].map(|host| (host.to_owned(), asked.0.stored(host)));

    let mut asked = Asked(ComputedTable::new(stored.into(), Vec::new()));
    assert_eq!(asked.0.needed().1, [id("/x in nyc")].into());
    asked.want("a", "nyc", &["/x"], 10);
    asked.want("b", "sfo", &["/x"], 10);
    assert_eq!(asked.changed(), [""; 0]);
    asked.in_sync(10);
    assert_eq!(asked.known("a"), [("/x".to_owned(), id("/x in nyc"))]);
    // The record of b has changed while the dominator was down.
    assert_eq!(asked.answer(11, 600, by_location), ["/x of b"]);
    assert_eq!(asked.answer(600, 600, by_location), ["/x of a"]);
    asked.0.advance(now(600));
    asked.in_sync(600);

    // Lost content is asked for again, as is all with another digest algorithm.
    asked.0.lost(&[id("/x in sfo"), id("/x in nyc")], now(650));
    assert_eq!(asked.known("b"), []);
    assert_eq!(asked.answer(650, 0, by_location), ["/x of a", "/x of b"]);
    asked.want_with("b", "sfo", (Algorithm::Sha512, &["/x"]), 660);
    assert_eq!(asked.known("b"), []);
    // An answer with the former algorithm comes too late.
    let batch = asked.0.next_batch(&SOURCE.into(), now(660)).unwrap();
    asked.want("b", "sfo", &["/x"], 661);
    let content = GeneratedContent {
        id: Algorithm::Sha512.digest(b""),
        size_bytes: 0,
        valid_until_seconds: 0,
        generator: id("/x"),
        is_secret: false,
    };
    let late = KnownContent::new(&content, batch.records[0], 0, Time::default());
    asked.0.take(&batch, vec![vec![Ok(late)]], now(661), 500);
    assert_eq!(asked.known("b"), []);
}

#[test]
fn content_of_a_former_generator_is_asked_for_again() {
    let mut asked = Asked(ComputedTable::default());
    let versions = |x| generators(1, &[("/x", x, 1)]);
    asked.set_generators(&versions("/x"), 0);
    asked.want("a", "nyc", &["/x"], 0);
    // The template is edited while the file is being made from the former one.
    let batch = asked.0.next_batch(&SOURCE.into(), now(0)).unwrap();
    asked.set_generators(&versions("new"), 1);
    let content = GeneratedContent {
        id: id("former"),
        size_bytes: 0,
        valid_until_seconds: 0,
        generator: id("/x"),
        is_secret: false,
    };
    let former = KnownContent::new(&content, batch.records[0], 9, Time::default());
    asked.0.take(&batch, vec![vec![Ok(former)]], now(2), 500);
    assert_eq!(asked.known("a"), [("/x".to_owned(), id("former"))]);
    assert_eq!(asked.unknown("a"), [("/x".to_owned(), BEING_ASKED.to_owned())]);
    assert_eq!(asked.0.ask_at(SOURCE), Some(Duration::from_secs(2) + VALID_SHORTEST));
    // The edit is taken back: the content is that of now, which the machine is told.
    asked.changed();
    asked.set_generators(&versions("/x"), 3);
    assert_eq!((asked.unknown("a"), asked.0.ask_at(SOURCE)), (vec![], None));
    assert_eq!(asked.changed(), ["a"]);
}

#[test]
fn content_of_a_former_record_is_known_and_is_not_that_of_now() {
    let mut asked = Asked(ComputedTable::default());
    asked.want("a", "nyc", &["/x"], 0);
    asked.answer(0, 0, by_location);
    assert_eq!(asked.unknown("a"), []);
    asked.want("a", "sfo", &["/x"], 1);
    assert_eq!(asked.known("a"), [("/x".to_owned(), id("/x in nyc"))]);
    assert_eq!(asked.unknown("a"), [("/x".to_owned(), BEING_ASKED.to_owned())]);
    asked.answer(1, 0, |_, _| None);
    assert_eq!(asked.unknown("a"), [("/x".to_owned(), "it failed".to_owned())]);
    asked.changed();
    // The same content, made from the new record, is news.
    asked.answer(100, 0, |_, _| Some("/x in nyc".to_owned()));
    assert_eq!((asked.unknown("a"), asked.changed()), (vec![], vec!["a".to_owned()]));
}

#[test]
fn a_question_is_for_as_many_files_as_a_server_takes() {
    let mut asked = Asked(ComputedTable::default());
    let paths: Vec<String> = (0..FILES_MAX / 2 - 1).map(|number| format!("/{number}")).collect();
    let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
    for hostname in ["a", "b", "c"] {
        asked.want(hostname, "nyc", &paths, 0);
    }
    let sizes = std::iter::from_fn(|| {
        let batch = asked.0.next_batch(&SOURCE.into(), now(0))?;
        Some(batch.request.machines.iter().map(|wanted| wanted.paths.len()).sum::<usize>())
    });
    assert_eq!(sizes.collect::<Vec<_>>(), [FILES_MAX - 2, FILES_MAX / 2 - 1]);
}

#[test]
fn what_was_stored_of_machines_that_are_gone_is_forgotten() {
    let stored = |hostname: &str| (hostname.to_owned(), StoredFiles::default());
    let restored = ["a", "gone", "plain"].map(stored).into();
    let mut asked = Asked(ComputedTable::new(restored, Vec::new()));
    asked.0.forget_others(|hostname| hostname != "gone");
    asked.want("plain", "nyc", &[], 0);
    assert_eq!(asked.0.needed().0, ["a".to_owned()].into());
}

#[test]
fn certificates_are_asked_for_with_the_key_that_the_machine_has_shown_last() {
    let mut asked = Asked(ComputedTable::default());
    let mut all = generators(1, &[("/cert", "/cert", 1), ("/x", "/x", 1)]);
    all.generators[0].kind = "certificate".to_owned();
    asked.set_generators(&all, 0);
    asked.want("a", "nyc", &["/cert", "/x"], 0);
    // As a server answers that needs a key.
    let by_key = |asked: &mut Asked, at| {
        let key = asked.0.key("a").map(|key| String::from_utf8(key.0.clone()).unwrap());
        asked.answer(at, 600, |path, machine| match (path, &key) {
            ("/cert", None) => None,
            ("/cert", Some(key)) => Some(format!("for {key}")),
            _ => by_location(path, machine),
        })
    };
    let cert = |asked: &Asked| {
        let known = asked.known("a").into_iter();
        known.filter(|(path, _)| path == "/cert").map(|(_, id)| id).next()
    };
    assert_eq!(by_key(&mut asked, 0), ["/cert of a", "/x of a"]);
    assert_eq!(asked.unknown("a"), [("/cert".to_owned(), "it failed".to_owned())]);
    asked.in_sync(0);
    assert!(asked.0.take_key("a", b"one", now(0)) && !asked.0.take_key("a", b"one", now(0)));
    assert_eq!(by_key(&mut asked, 0), ["/cert of a"]);
    assert_eq!(cert(&asked), Some(id("for one")));
    asked.in_sync(0);

    // The answer for a former key comes too late; that for another file does not.
    assert!(asked.0.take_key("a", b"two", now(10)));
    let late = asked.0.next_batch(&SOURCE.into(), now(10)).unwrap();
    assert_eq!(late.request.machines[0].key, Some(ByteText(b"two".to_vec())));
    assert!(asked.0.take_key("a", b"three", now(10)));
    asked.0.failed(&late, "of no use", now(10), 500);
    assert_eq!(by_key(&mut asked, 10), ["/cert of a"]);
    assert_eq!(cert(&asked), Some(id("for three")));

    // It is known after a restart, so that nothing is asked for.
    let stored = [("a".to_owned(), asked.0.stored("a"))];
    let mut asked = Asked(ComputedTable::new(stored.clone().into(), Vec::new()));
    asked.set_generators(&all, 20);
    assert!(!asked.0.take_key("a", b"three", now(20)));
    asked.want("a", "nyc", &["/cert", "/x"], 20);
    assert!(!asked.0.take_key("a", b"three", now(20)));
    assert_eq!((by_key(&mut asked, 21), asked.changed()), (vec![], vec![]));

    // A machine that shows another one before its files are wanted gets another certificate, also
    // if the dominator is started again before that is made, and whenever the server tells of its
    // generators.
    let mut asked = Asked(ComputedTable::new(stored.into(), Vec::new()));
    assert!(asked.0.take_key("a", b"four", now(30)));
    asked.want("a", "nyc", &["/cert", "/x"], 30);
    assert_eq!(asked.changed(), ["a"]);
    let stored = [("a".to_owned(), asked.0.stored("a"))];
    let mut asked = Asked(ComputedTable::new(stored.into(), Vec::new()));
    assert!(asked.0.take_key("a", b"four", now(40)));
    asked.want("a", "nyc", &["/cert", "/x"], 40);
    asked.want("a", "nyc", &["/cert", "/x", "/y"], 40);
    asked.set_generators(&all, 40);
    asked.changed();
    assert_eq!(by_key(&mut asked, 41), ["/cert of a", "/x of a", "/y of a"]);
    assert_eq!((cert(&asked), asked.changed()), (Some(id("for four")), vec!["a".to_owned()]));
    let stored = asked.0.stored("a");
    assert_eq!(stored.key, Some(ByteText(b"four".to_vec())));

    // The outputs of its resources are stored when they become others.
    let mut asked = Asked(ComputedTable::new([("a".to_owned(), stored)].into(), Vec::new()));
    assert!(asked.0.take_outputs("a", "{}", now(50)));
    asked.want("a", "nyc", &["/cert", "/x", "/y"], 50);
    assert_eq!(asked.changed(), ["a"]);
    assert_eq!(&*asked.0.stored("a").outputs, "{}");
    asked.0.forget("a");
    assert_eq!(asked.0.key("a"), None);
}

#[test]
fn a_machine_whose_certificate_has_ended_gets_the_one_for_its_last_key() {
    const OWN: &str = api::subd::OWN_CERTIFICATE;
    let mut asked = Asked(ComputedTable::default());
    let of =
        |asked: &mut Asked, host: &str, key: &[u8], at| asked.0.replacement(host, key, now(at));
    let not_known = |why: &str| Err(NoCertificate::NotKnown(why.to_owned()));
    let made = |path: &str, machine: &Machine| Some(format!("{path} {}", machine.location));
    let own = |location: &str| Ok(id(&format!("{OWN} {location}")));

    assert_eq!(of(&mut asked, "web1", b"a", 0), Err(NoCertificate::NotComputed));
    asked.want("web1", "nyc", &["/etc/motd"], 0);
    assert_eq!(of(&mut asked, "web1", b"a", 0), Err(NoCertificate::NotComputed));
    asked.answer(0, 0, made);

    // A key that is not known counts, and is asked with.
    asked.want("web1", "nyc", &["/etc/motd", OWN], 1);
    asked.answer(1, 0, |_, _| None);
    assert_eq!(of(&mut asked, "web1", b"a", 2), not_known("it failed"));
    let batch = asked.0.next_batch(&SOURCE.into(), now(2)).unwrap();
    let key = batch.request.machines[0].key.clone();
    assert_eq!(key, Some(ByteText(b"a".to_vec())));
    asked.0.failed(&batch, "it is away", now(2), 500);
    // It is not known yet which of them are certificates.
    assert_eq!(
        asked.answer(5, 0, made),
        ["/etc/motd of web1".to_owned(), format!("{OWN} of web1")]
    );
    assert_eq!(of(&mut asked, "web1", b"a", 6), own("nyc"));
    assert_eq!(of(&mut asked, "web1", b"a", 15), Err(NoCertificate::JustNow));
    assert_eq!(of(&mut asked, "web1", b"a", 16), own("nyc"));

    // Another one is not taken from a certificate that has ended.
    assert_eq!(of(&mut asked, "web1", b"b", 30), Err(NoCertificate::OtherKey));
    assert_eq!(of(&mut asked, "web1", b"a", 30), own("nyc"));
    assert!(asked.0.take_key("web1", b"b", now(40)));
    assert_eq!(of(&mut asked, "web1", b"a", 40), Err(NoCertificate::OtherKey));

    // It is the one in use, also while another one is made.
    asked.answer(40, 0, made);
    asked.want("web1", "sfo", &["/etc/motd", OWN], 50);
    assert_eq!(of(&mut asked, "web1", b"b", 50), own("nyc"));
    asked.want("web1", "sfo", &["/etc/motd"], 60);
    assert_eq!(asked.0.may_replace("web1", now(60)), Err(NoCertificate::NotComputed));
}
