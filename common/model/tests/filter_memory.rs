//! How much memory filters take while they are compiled and matched, within the documented limits.
//!
//! One test, because it measures the memory of the whole process.
#![expect(clippy::unwrap_used, reason = "a test that fails panics")]

use std::time::Instant;

use model::filter::{Filter, LINES_MAX};
use model::path::TreePath;
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

/// The most that a filter takes besides the text of its lines, in bytes.
const BYTES_MAX: usize = 64 << 20;

/// The length of the longest line, in bytes.
const LINE_BYTES: usize = 64 << 10;

/// Numbers that look random, the same each time.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % end
    }

    fn choose<'choice, T: ?Sized>(&mut self, from: &[&'choice T]) -> &'choice T {
        from[self.below(from.len())]
    }

    fn text(&mut self, parts: &[&str], bytes: usize) -> String {
        let mut text = String::new();
        while text.len() < bytes {
            text.push_str(self.choose(parts));
        }
        text
    }
}

const PATH_PARTS: [&str; 12] =
    ["/", "a", "b", "z", "0", ".", "é", "\n", "\u{ff}", "app", "/var/lib/", "/srv/app7"];

/// What random lines are made of: each sequence is an expression.
const LINE_PARTS: [&str; 20] = [
    "/",
    "a",
    "é",
    ".",
    ".*",
    "[a-z]",
    "[^/]*",
    "(?:a|b)",
    "(?:/.)+",
    "b{2,50}",
    "z?",
    r"\w",
    "|",
    r"(?u:\w)",
    r"(?u:\b)",
    "(?i:stra)",
    "$",
    r"\xff",
    "(?:[a-f]{1,9}/){3}",
    "(?x: )",
];

/// Returns the peak of memory, besides the text, and whether the lines were accepted.
fn measure(lines: &[String], numbers: &mut Numbers) -> (usize, bool) {
    let texts: usize = lines.iter().map(String::len).sum();
    let before = ALLOCATED.current_usage();
    ALLOCATED.reset_peak_usage();
    let filter = Filter::new(lines);
    let is_accepted = filter.is_ok();
    if let Ok(filter) = filter {
        for _ in 0..100 {
            let text = format!("/{}", numbers.text(&PATH_PARTS, 30)).replace("//", "/x/");
            if let Ok(path) = TreePath::new(text.trim_end_matches('/').as_bytes()) {
                let _kept = filter.keeps(&path);
            }
        }
    }
    // The lines are copied once; an error has a copy of one.
    let copied = texts + LINE_BYTES;
    (ALLOCATED.peak_usage().saturating_sub(before + copied), is_accepted)
}

fn realistic(number: usize) -> String {
    match number % 5 {
        0 => format!("/var/lib/app{number}/.*"),
        1 => format!("/etc/app{number}.conf$"),
        2 => format!("/srv/app{number}/(?:cache|tmp)/"),
        3 => format!("/home/[^/]*/.app{number}"),
        _ => format!("/opt/app{number}/[^/]*/state"),
    }
}

/// Lines that are as bad as lines can be, each in its way.
fn adversarial() -> Vec<(&'static str, Vec<String>)> {
    let repeated = |part: &str| vec![part.repeat(LINE_BYTES / part.len()); 16];
    let many = |line: &str| vec![line.to_owned(); LINES_MAX];
    vec![
        ("large classes", many("(?:/[a-z]{1,500}){1,200}")),
        ("just too large", many("(?:/[a-z]{1,500}){1,20000}")),
        ("nested counts", many("(?:(?:(?:a{1,30}){1,30}){1,30}){1,30}")),
        ("characters", many(r"/(?u:\w{1,40})/(?u:\W{1,40})")),
        ("without case", many(r"/(?ui:\p{Greek}{1,60})")),
        ("alternatives", repeated("/a|[bc]|")),
        ("classes of bytes", repeated("[a-f]")),
        ("characters in a long line", vec![r"(?u:\pL)".repeat(500); 16]),
        ("empty groups", repeated("(?:|)")),
        ("stars", repeated("[ab]*")),
        ("any but one", repeated("[^/]?")),
        ("spaces", repeated("(?x: )a?.")),
        ("words", repeated(r"[ab]\b")),
        ("classes of characters", vec![format!("(?u:{})", r"\w".repeat(2_040)); 64]),
        ("deep", vec![format!("{}a{}", "(?:".repeat(100), ")?".repeat(100)); 1_000]),
        ("many automata", {
            let spaces = " ".repeat(1_600);
            vec![format!("(?x:{spaces})/(?:.*a.{{1,14}}|.*z.{{1,12}})b"); LINES_MAX]
        }),
        ("states while matching", many("/(?:.*a.{1,14}|.*z.{1,12})b")),
        ("literals", (0..LINES_MAX).map(|n| format!("/{n}{}", "x".repeat(1_000))).collect()),
    ]
}

#[test]
fn no_filter_takes_more_than_64_mebibytes() {
    let mut numbers = Numbers(1);
    let lines: Vec<String> = (0..LINES_MAX).map(realistic).collect();
    let start = Instant::now();
    assert!(Filter::new(&lines).is_ok());
    eprintln!("{LINES_MAX} realistic lines are compiled in {:?}", start.elapsed());
    let mut measured = vec![("realistic lines".to_owned(), measure(&lines, &mut numbers))];
    for (name, lines) in adversarial() {
        let start = Instant::now();
        measured.push((name.to_owned(), measure(&lines, &mut numbers)));
        eprintln!("{name}: {:?} in {:?}", measured.last().unwrap().1, start.elapsed());
    }
    for seed in 0..30 {
        let mut numbers = Numbers(seed);
        let (count, bytes) = match seed % 3 {
            0 => (1 + numbers.below(10), 1 + numbers.below(LINE_BYTES)),
            1 => (1 + numbers.below(LINES_MAX), 1 + numbers.below(40)),
            _ => (1 + numbers.below(300), 1 + numbers.below(500)),
        };
        let line = |numbers: &mut Numbers| format!("/{}", numbers.text(&LINE_PARTS, bytes));
        let lines: Vec<String> = (0..count).map(|_| line(&mut numbers)).collect();
        measured.push((format!("seed {seed}"), measure(&lines, &mut numbers)));
        eprintln!("seed {seed}: {:?}", measured.last().unwrap().1);
    }
    assert!(measured[0].1.1, "the realistic lines are refused");
    let accepted = measured.iter().filter(|(_, (_, is_accepted))| *is_accepted).count();
    assert!(accepted > 15, "only {accepted} were accepted: the test tries too little");
    measured.retain(|(_, (bytes, _))| *bytes > BYTES_MAX);
    assert_eq!(measured, []);
}
