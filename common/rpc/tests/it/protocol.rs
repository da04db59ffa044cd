//! `docs/PROTOCOL.md` says what the code does.

use std::collections::BTreeMap;

use api::fault::FaultCode;
use api::method::Method;
use schemars::JsonSchema;

use crate::methods::{self, Visitor};

fn document() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/PROTOCOL.md");
    std::fs::read_to_string(path).unwrap()
}

fn size(bytes: usize) -> String {
    format!("{} MiB", bytes >> 20)
}

/// The beginnings of rows of the table.
#[derive(Default)]
struct Rows(Vec<String>);

impl Visitor for Rows {
    fn method<M>(&mut self, _: (M::Request, M::Reply))
    where
        M: Method<Request: JsonSchema, Reply: JsonSchema>,
    {
        let (request, reply) = (size(M::REQUEST_BYTES_MAX), size(M::REPLY_BYTES_MAX));
        // What is streamed has no limit.
        let limits = match M::NAME {
            "ObjectServer.AddObjects" | "ObjectServer.GetObjects" => String::new(),
            _ => format!(" {request} | {reply} |"),
        };
        self.0.push(format!("| `{}` | {} |{limits}", M::NAME, M::ACCESS.describe()));
    }
}

/// Returns the rows of the table of methods.
fn table(document: &str) -> Vec<&str> {
    let (_, table) = document.split_once("\n## Methods\n").unwrap();
    table.lines().take_while(|line| !line.starts_with("## ")).collect()
}

/// Returns what each method does, by its name.
pub fn summaries() -> BTreeMap<String, String> {
    let document = document();
    let cells = |row: &str| {
        let cells: Vec<&str> = row.split(" | ").collect();
        let name = cells.first()?.strip_prefix("| `")?.strip_suffix('`')?;
        Some((name.to_owned(), cells.last()?.strip_suffix(" |")?.to_owned()))
    };
    table(&document).into_iter().filter_map(cells).collect()
}

#[test]
fn every_method_is_in_the_table_with_its_access_and_limits() {
    let mut rows = Rows::default();
    methods::all(&mut rows);
    let document = document();
    let table = table(&document);
    let reserved = api::methods().into_iter().filter(|method| method.reserved);
    let reserved = reserved.map(|one| format!("| `{}` | {} |", one.name, one.access.describe()));
    for row in rows.0.into_iter().chain(reserved) {
        assert!(table.iter().any(|line| line.starts_with(&row)), "PROTOCOL.md lacks the row {row}");
    }
}

#[test]
fn every_fault_is_in_the_document_with_its_status() {
    let document = document();
    for code in FaultCode::ALL {
        let row = format!("| `{}` | {} |", code.name(), code.status());
        assert!(document.contains(&row), "PROTOCOL.md lacks the row {row}");
    }
}
