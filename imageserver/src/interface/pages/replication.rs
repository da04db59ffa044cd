//! The part of the status page that says how a server stands with its master and its replicas.
// tidy: core

use api::image_server::replication::{
    GetReplicationReply, Link, MasterState, ReplicaState, Trouble,
};
use model::tree::Time;
use model::when::ago;
use model::words::{counted, size};
use rpc::page_frame::{Cell, Mark, pairs, table};

/// How many images are named.
const NAMED_MAX: usize = 100;

/// What operators must know at once.
#[must_use]
pub fn alarms(state: &GetReplicationReply) -> String {
    let Some(master) = &state.master else { return String::new() };
    let mut texts = Vec::new();
    if matches!(master.link, Link::Broken | Link::Loop) {
        let why = master.last_error.as_ref().map_or("", |(_, why)| why);
        texts.push(format!("The master {} is not followed: {why}", master.address));
    }
    texts.extend(master.directories.as_ref().map(|troubled| troubled.text.clone()));
    let rows = |texts: Vec<String>| -> Vec<Vec<Cell>> {
        texts.into_iter().map(|text| vec![Cell::Mark { mark: Mark::Bad, text }]).collect()
    };
    let mut html =
        if texts.is_empty() { String::new() } else { table(&["Replication"], &rows(texts)) };
    let troubles: Vec<Vec<Cell>> = master
        .troubles
        .iter()
        .take(NAMED_MAX)
        .map(|image| {
            let mark = if image.trouble == Trouble::Failing { Mark::Busy } else { Mark::Bad };
            vec![
                Cell::Name(image.name.to_string()),
                Cell::Mark { mark, text: image.trouble.name().to_owned() },
                Cell::Text(image.text.clone()),
            ]
        })
        .collect();
    if !troubles.is_empty() {
        html.push_str("<h2>Images that are not as on the master</h2>\n");
        html.push_str(&table(&["Name", "Trouble", "What it is"], &troubles));
    }
    html
}

/// How all stands.
#[must_use]
pub fn section(state: &GetReplicationReply, now: Time) -> String {
    let mut html = String::new();
    if let Some(master) = &state.master {
        html.push_str("<h2>Master</h2>\n");
        html.push_str(&pairs(facts(master, now)));
    }
    if !state.replicas.is_empty() {
        html.push_str("<h2>Replicas</h2>\n");
        let rows: Vec<Vec<Cell>> = state.replicas.iter().map(|replica| row(replica, now)).collect();
        html.push_str(&table(&["Address", "Store", "Last asked", "State"], &rows));
    }
    html
}

fn facts(master: &MasterState, now: Time) -> [(&'static str, String); 8] {
    let or_none = |texts: &[String], none: &str| match texts {
        [] => none.to_owned(),
        texts => texts.join(", "),
    };
    let level = match (master.is_level, master.level_at) {
        (true, _) => "yes".to_owned(),
        (false, None) => "not yet".to_owned(),
        (false, Some(at)) => format!("no; it was {}", ago(now, at)),
    };
    let behind = match master.images_behind {
        0 => "nothing".to_owned(),
        images => {
            let left = size(master.bytes_left);
            format!("{}, at most {left} to fetch", counted(images, "image"))
        }
    };
    let error = master.last_error.as_ref();
    let mut follows = or_none(&master.include, "all images");
    if !master.exclude.is_empty() {
        follows = format!("{follows} except {}", master.exclude.join(", "));
    }
    if master.is_archive {
        follows.push_str("; keeps what has ended there");
    }
    [
        ("Address", master.address.clone()),
        ("State", format!("{}, {}", master.link.name(), ago(now, master.since))),
        ("Level with it", level),
        ("Still to come", behind),
        ("Follows", follows),
        ("Images that are only here", master.only_here_total.to_string()),
        ("Images here that are not followed", master.not_followed.to_string()),
        (
            "Last error",
            error.map_or("none".to_owned(), |(at, why)| format!("{}: {why}", ago(now, *at))),
        ),
    ]
}

fn row(replica: &ReplicaState, now: Time) -> Vec<Cell> {
    let (mark, text) = match (replica.is_connected, replica.is_level) {
        (false, _) => (Mark::Bad, "does not ask any more".to_owned()),
        (true, true) => (Mark::Good, "level".to_owned()),
        (true, false) => {
            (Mark::Busy, format!("{} behind", counted(replica.images_behind, "image")))
        }
    };
    vec![
        Cell::Name(replica.address.clone()),
        Cell::Text(replica.server.to_string()),
        Cell::Text(ago(now, replica.seen)),
        Cell::Mark { mark, text },
    ]
}
