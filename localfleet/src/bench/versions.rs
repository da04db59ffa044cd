//! Measures an image server with many versions of a large image.
//!
//! Each version differs from the one before in as many files as a security update changes, and is
//! sent as `imagetool` would send it. It is made in memory, because making each as a tree on disk
//! would take longer than all the rest.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use api::image_server::{AddImage, AddImageRequest, GetImage, GetImageRequest};
use api::object_server::AddObjects;
use api::object_stream::ObjectHead;
use bytes::Bytes;
use model::image::{Image, ImageName};
use model::object::ObjectId;
use model::tree::Tree;
use rpc::client::Client;
use rpc::trees::TreeReader;

use super::fixture::{self, Content, Shape};
use super::measure::{Row, cpu_of, mebibytes, memory_of, seconds};
use super::{Bench, settle, upload};
use crate::compare::list;
use crate::fleet::client_of;
use crate::simulator::patch::{own_directories, with_one_file};

/// The size of a file, in bytes.
const FILE_BYTES: u64 = 1_000;

/// How long the server is left alone before it counts as idle.
const SETTLE: Duration = Duration::from_secs(20);

/// The most time for the server to check an image.
const ADD_MAX: Duration = Duration::from_secs(60);

/// The goals for a server with all versions.
const START_WANTED: f64 = 1.0;
const MEMORY_WANTED: u64 = 64 << 20;

/// Measures adding the versions, a restart of the server, and the idle server.
///
/// # Errors
///
/// If a version cannot be added.
pub fn measure(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let versions = u64::from(bench.arguments.versions);
    let directory = bench.fleet_directory("versions");
    fs::create_dir_all(&directory).context("cannot make a directory")?;
    let mut fleet = bench.servers(directory.clone(), bench.arguments.insecure)?;
    let (tree, files) = (bench.place.join("versions-tree"), fixture::FILES);
    let bytes = files as u64 * FILE_BYTES;
    fixture::make(&tree, Shape { seed: 0x5eed_4000, files, bytes, content: Content::Noise })?;
    upload(&fleet, "version/0", &tree, &[])?;
    fs::remove_dir_all(&tree).context("cannot remove a tree")?;
    let data = directory.join("imageserver");
    let first = disk_bytes(&data)?;
    let address = fleet.addresses().imageserver;
    let id = fleet.imageserver.id().context("the imageserver does not run")?;
    let before = cpu_of(id)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let took = Instant::now();
    runtime.block_on(add_versions(&client_of(address, fleet.security()), versions))?;
    let took = took.elapsed().as_secs_f64();
    let cpu = (cpu_of(id)? - before).as_secs_f64();
    let most = memory_of(id).context("the imageserver has ended")?.most;
    let all = disk_bytes(&data)?;
    settle()?;
    fleet.imageserver.stop()?;
    let start = Instant::now();
    fleet.imageserver.start_again()?;
    fleet.wait_ready()?;
    let started = start.elapsed().as_secs_f64();
    std::thread::sleep(SETTLE);
    let id = fleet.imageserver.id().context("the imageserver does not run")?;
    let idle = memory_of(id).context("the imageserver has ended")?.now;
    bench.end("versions", fleet)?;
    let name = format!("{versions} versions of {files} files, each with {CHANGED} others");
    let row = |what: &str, ours: String, ratio: Option<f64>, wanted: String| Row {
        what: format!("{name}: {what}"),
        ours,
        peer: String::new(),
        ratio,
        wanted,
    };
    let mean = versions as f64;
    let shown = |bytes: u64| mebibytes(bytes as f64);
    Ok(vec![
        row(
            "to add one, its directories and files sent",
            format!("{} (CPU of the imageserver: {})", seconds(took / mean), seconds(cpu / mean)),
            None,
            String::new(),
        ),
        row(
            "disk",
            format!("{} (the first alone: {})", shown(all), shown(first)),
            Some(all as f64 / first as f64),
            String::new(),
        ),
        row("the most resident memory", shown(most), None, String::new()),
        row(
            "start to first answer",
            seconds(started),
            Some(started / START_WANTED),
            seconds(START_WANTED),
        ),
        row(
            "resident memory, idle",
            shown(idle),
            Some(idle as f64 / MEMORY_WANTED as f64),
            shown(MEMORY_WANTED),
        ),
    ])
}

/// Returns the disk space of the files below `directory`, in bytes.
fn disk_bytes(directory: &Path) -> anyhow::Result<u64> {
    Ok(list(directory, &|_| false)?.values().map(|metadata| metadata.blocks() * 512).sum())
}

/// The number of files of each version that differ from the version before.
const CHANGED: u64 = fixture::SMALL.files as u64;

async fn add_versions(client: &Client, versions: u64) -> anyhow::Result<()> {
    let name = |number: u64| ImageName::new(&format!("version/{number}"));
    let request = GetImageRequest { name: name(0)?, wait_ms: 0 };
    let Image { mut content, notes } = client.call::<GetImage>(&request).await?;
    let reader = Arc::new(TreeReader::new(1));
    let mut tree = reader.from_image_server(client, content.root).await?;
    let mut known: BTreeSet<ObjectId> = own_directories(&tree, |_| false).into_keys().collect();
    for number in 1..versions {
        if number % 100 == 0 {
            eprintln!("{number} of {versions} versions are added");
        }
        let mut body = Vec::new();
        tree = next(&tree, number, &mut body)?;
        for (id, directory) in own_directories(&tree, |one| known.contains(&one.digest())) {
            append(&mut body, id, &directory.encode());
            known.insert(id);
        }
        ObjectHead::End.encode(&mut body);
        let body = futures_util::stream::iter([Ok(Bytes::from(body))]);
        client.upload::<AddObjects>(body).await.context("cannot upload")?;
        (content.root, content.name) = (tree.digest(), name(number)?);
        let request = AddImageRequest { content: content.clone(), notes: notes.clone() };
        client.call_within::<AddImage>(&request, ADD_MAX).await.context("cannot add")?;
    }
    Ok(())
}

/// Returns the version after `tree`, and appends the content of its changed files to `body`.
fn next(tree: &Tree, number: u64, body: &mut Vec<u8>) -> anyhow::Result<Tree> {
    let mut tree = tree.clone();
    for file in 0..CHANGED {
        let chance = (number * CHANGED + file + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let next = with_one_file(&tree, chance, &mut |file| {
            let size = usize::try_from(file.size_bytes).unwrap_or_default();
            let content: Vec<u8> = chance.to_le_bytes().into_iter().cycle().take(size).collect();
            let object = file.object.id().algorithm().digest(&content);
            append(body, object, &content);
            file.object = object.into();
        });
        tree = next.context("the image has no file")?;
    }
    ensure!(body.len() > 1, "nothing has changed");
    Ok(tree)
}

fn append(body: &mut Vec<u8>, id: ObjectId, content: &[u8]) {
    ObjectHead::Object { id, size_bytes: content.len() as u64 }.encode(body);
    body.extend_from_slice(content);
}
