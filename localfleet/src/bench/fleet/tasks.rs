//! A fleet with five daemon tasks on each machine, beside the same fleet without them.

use anyhow::{Context as _, ensure};

use super::{LIMIT, Run};
use crate::fleet::client_of;
use crate::simulator::control::SetTasks;

/// The tasks of each machine.
const TASKS: u32 = 5;

/// The goals: what the tasks of a machine may take, in bytes, and the processor time of an idle
/// dominator as a multiple of that without tasks.
const MEMORY_WANTED: f64 = 1_024.0;
const CPU_WANTED: f64 = 1.2;

impl Run {
    /// Gives all machines tasks, and compares the dominator's memory and its processor time when
    /// idle with those before.
    pub(super) fn tasks(&mut self) -> anyhow::Result<()> {
        let (_, memory_before) = self.started("without tasks")?;
        let cpu_before = self.idle()?;
        let wanted = self.subs * usize::try_from(TASKS)?;
        self.all.ask::<SetTasks>(&TASKS)?;
        self.all.wait("all tasks are known", LIMIT, |all| {
            let client = client_of(all.fleet.addresses().dominator, all.fleet.security());
            let (status, text) = all.fleet.get(&client, "/metrics")?;
            ensure!(status == 200, "/metrics: {status}");
            let text = String::from_utf8(text).context("/metrics is not text")?;
            let line = format!("dominator_tasks{{state=\"running\"}} {wanted}");
            Ok(text.lines().any(|found| found == line))
        })?;
        let (_, memory) = self.started(&format!("{TASKS} tasks on each machine"))?;
        let cpu = self.idle()?;
        let added = (memory as f64 - memory_before as f64) / self.subs as f64;
        let what = format!("memory that {TASKS} tasks add to a machine");
        self.row(&what, format!("{added:.0} bytes"));
        if let Some(row) = self.rows.last_mut() {
            row.ratio = Some(added / MEMORY_WANTED);
            row.wanted = format!("{MEMORY_WANTED:.0} bytes");
        }
        let shown = |share: f64| format!("{:.2} %", share * 100.0);
        self.row(&format!("idle with {TASKS} tasks each, beside without: CPU"), shown(cpu));
        if let Some(row) = self.rows.last_mut() {
            row.peer = shown(cpu_before);
            row.ratio = Some(cpu / cpu_before);
            row.wanted = format!("{CPU_WANTED} times");
        }
        Ok(())
    }
}
