//! Many readers of pages, and a machine database that is written all the time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rpc::client::Client;

use super::Run;
use crate::bench::measure::{Samples, seconds};
use crate::fleet::client_of;
use crate::simulator::machines::hostname;

/// How many readers ask for one page after the other.
const READERS: usize = 50;

/// How often the machine database is written in a row, how fast, and how many rows there are.
const EDITS: usize = 20;
const EDIT_PAUSE: Duration = Duration::from_millis(50);
const ROWS: usize = 30;

/// The longest wait for an edit to take effect.
const EFFECT_MAX: Duration = Duration::from_secs(60);

/// How often the dominator is asked whether an edit has taken effect.
const ASK_PAUSE: Duration = Duration::from_millis(5);

/// The goals for 99 % of the pages and of the edits, in seconds.
const PAGE_WANTED: f64 = 0.2;
const EDIT_WANTED: f64 = 1.0;

impl Run {
    /// Measures how long pages take, and edits from the last write of a row to their effect.
    pub(super) fn readers(&mut self, image_of: &dyn Fn(usize) -> String) -> anyhow::Result<()> {
        eprintln!("{}: {READERS} readers of pages", self.name);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .context("cannot start readers")?;
        let address = self.all.fleet.addresses().dominator;
        let before = self.cpu()?;
        let stop = Arc::new(AtomicBool::new(false));
        let readers: Vec<_> = (0..READERS)
            .map(|_| {
                let client = client_of(address, self.all.fleet.security());
                runtime.spawn(read_until(client, Arc::clone(&stop)))
            })
            .collect();
        let edits = self.edits(image_of);
        stop.store(true, Ordering::Relaxed);
        let edits = edits?;
        let mut pages = Samples::default();
        for reader in readers {
            runtime.block_on(reader)??.into_iter().for_each(|took| pages.add(took));
        }
        let shown = |samples: &Samples| {
            let at = |hundredths| seconds(samples.percentile(hundredths));
            format!("99 % {}, median {}, most {}", at(99), at(50), at(100))
        };
        for (what, samples, wanted) in [
            (format!("a page for one of {READERS} readers"), &pages, PAGE_WANTED),
            (format!("{EDITS} edits in a row, from the last to its effect"), &edits, EDIT_WANTED),
        ] {
            self.wanted(&what, samples.percentile(99), wanted);
            if let Some(row) = self.rows.last_mut() {
                row.ours = shown(samples);
            }
        }
        self.spent(&format!("{READERS} readers, {ROWS} rows of edits"), before)
    }

    /// Writes rows of edits. Returns how long each took from its last edit to the effect.
    fn edits(&self, image_of: &dyn Fn(usize) -> String) -> anyhow::Result<Samples> {
        let names: Vec<String> = (0..self.subs).map(image_of).collect();
        let mut machines = self.all.machines(|number| &names[number])?;
        let mut edits = Samples::default();
        for row in 0..ROWS {
            let mut label = String::new();
            for edit in 0..EDITS {
                label = format!("{row}-{edit}");
                for machine in &mut machines {
                    machine.tags.insert("edit".to_owned(), label.clone());
                }
                self.all.fleet.replace_mdb(&machines)?;
                std::thread::sleep(EDIT_PAUSE);
            }
            let written = Instant::now();
            while self.all.fleet.detail(&hostname(0))?.machine.tags.get("edit") != Some(&label) {
                ensure!(written.elapsed() < EFFECT_MAX, "edit {label} has no effect");
                std::thread::sleep(ASK_PAUSE);
            }
            // The pause after the last edit counts.
            edits.add((written.elapsed() + EDIT_PAUSE).as_secs_f64());
        }
        Ok(edits)
    }
}

/// Reads the page of all machines until it is told to stop. Returns how long each took, in seconds.
async fn read_until(client: Client, stop: Arc<AtomicBool>) -> anyhow::Result<Vec<f64>> {
    let mut all = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let start = Instant::now();
        let (status, _) = client.get("/").await?;
        ensure!(status == 200, "a page has status {status}");
        all.push(start.elapsed().as_secs_f64());
    }
    Ok(all)
}
