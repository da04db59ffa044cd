//! The live table of the demo: what each machine is doing, redrawn in place on a terminal.

use std::io::{IsTerminal as _, Write as _};
use std::time::Instant;

use api::dominator::SubSummary;

/// Draws to stderr: a table in place on a terminal, a line for each change elsewhere.
pub struct Table {
    start: Instant,
    terminal: bool,
    lines: usize,
    last: Vec<String>,
}

impl Default for Table {
    fn default() -> Self {
        Self::new()
    }
}

impl Table {
    /// Starts a table; its times count from now.
    pub fn new() -> Self {
        let terminal = std::io::stderr().is_terminal();
        Self { start: Instant::now(), terminal, lines: 0, last: Vec::new() }
    }

    /// Shows `subs`, if they differ from what was shown last.
    pub fn show(&mut self, subs: &[SubSummary]) {
        let rows: Vec<String> = subs
            .iter()
            .map(|sub| {
                let address = sub.address.map_or_else(String::new, |address| address.to_string());
                let detail: String = sub.detail.chars().take(60).collect();
                format!("{:<8} {address:<18} {:<16} {detail}", sub.hostname, sub.status)
            })
            .collect();
        if rows == self.last {
            return;
        }
        let seconds = self.start.elapsed().as_secs_f64();
        let mut text = String::new();
        if self.terminal {
            if self.lines > 0 {
                // Up to the first line of the table, and clear from there.
                text.push_str(&format!("\x1b[{}A\x1b[J", self.lines));
            }
            text.push_str(&format!("  {seconds:>7.2} s  HOST     ADDRESS            STATUS\n"));
            for row in &rows {
                text.push_str(&format!("             {row}\n"));
            }
            self.lines = rows.len() + 1;
        } else {
            for row in rows.iter().filter(|row| !self.last.contains(row)) {
                text.push_str(&format!("  {seconds:>7.2} s  {row}\n"));
            }
        }
        self.last = rows;
        // A terminal that went away is no reason to stop the fleet.
        let _unseen = std::io::stderr().write_all(text.as_bytes());
    }

    /// Ends the table in place: what follows is below it.
    pub fn finish(&mut self) {
        self.lines = 0;
        self.last.clear();
    }
}
