//! The handbook knows every status, every metric, and what exit codes mean.

use std::collections::BTreeSet;
use std::process::Command;

use api::dominator::{ShowSub, ShowSubRequest, Status};

use crate::stage::Stage;

fn document(name: &str) -> String {
    let path = format!("{}/../{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn every_status_is_explained() {
    let text = document("docs/OPERATING.md");
    for status in Status::ALL {
        let name = format!("`{status}`");
        assert!(text.contains(&name), "docs/OPERATING.md does not explain {name}");
    }
}

/// The names of the metrics in a text for Prometheus, as they are looked for there.
pub fn told(metrics: &str) -> BTreeSet<String> {
    let types = metrics.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let name = |line: &str| match line.split_once(' ').unwrap() {
        (name, "counter") => format!("{name}_total"),
        (name, _) => name.to_owned(),
    };
    types.map(name).collect()
}

/// The heading of what all daemons tell.
pub const OF_ALL: &str = "### Metrics of all daemons";

/// The names of the metrics in the first columns of the tables of a part of the handbook, which
/// ends with the next heading.
pub fn explained(heading: &str) -> BTreeSet<String> {
    let text = document("docs/OPERATING.md");
    let (_, part) = text.split_once(&format!("\n{heading}\n")).unwrap();
    let part = part.split("\n##").next().unwrap();
    let rows = part.lines().filter(|line| line.starts_with("| `dominator_"));
    let cells = rows.map(|row| row.split(" | ").next().unwrap());
    let names =
        cells.flat_map(|cell| cell.split('`')).filter(|name| name.starts_with("dominator_"));
    names.map(|name| name.split('{').next().unwrap().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_metric_is_explained() {
    let stage = Stage::new("[]").await;
    // Some are there from the first call and the first fault on.
    stage.status().await;
    let request = ShowSubRequest { hostname: "nobody".to_owned() };
    stage.client.call::<ShowSub>(&request).await.unwrap_err();
    let (_, metrics) = stage.client.get("/metrics").await.unwrap();
    let metrics = String::from_utf8(metrics.to_vec()).unwrap();
    let expected: BTreeSet<String> = &explained("## Metrics") | &explained(OF_ALL);
    assert_eq!(told(&metrics), expected);
}

#[test]
fn exit_codes_are_told_in_one_way() {
    let truth = "0 done (compared: same), 1 failed, 2 misuse, 3 partly done (compared: different)";
    let output = Command::new(testing::program("domtool")).arg("--help").output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    for (name, text) in [
        ("domtool --help", help),
        ("README.md", document("README.md")),
        ("docs/OPERATING.md", document("docs/OPERATING.md")),
    ] {
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains(truth), "{name} says something else than: {truth}");
    }
}
