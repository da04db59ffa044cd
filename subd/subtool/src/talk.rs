//! What subtool says on stderr while it works.

use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

/// How often progress is shown.
const PACE: Duration = Duration::from_millis(250);

/// Says what is going on: stages always, progress on a terminal only.
#[derive(Debug)]
pub struct Talk {
    is_terminal: bool,
    shown: Instant,
    is_open: bool,
    stage: String,
}

impl Default for Talk {
    fn default() -> Self {
        let is_terminal = std::io::stderr().is_terminal();
        Self { is_terminal, shown: Instant::now(), is_open: false, stage: String::new() }
    }
}

impl Talk {
    /// Says what is done now, unless that was said last.
    pub fn stage(&mut self, text: &str) {
        if self.stage != text {
            self.close();
            say(&format!("{text}\n"));
            text.clone_into(&mut self.stage);
        }
    }

    /// Shows how far it is.
    pub fn progress(&mut self, text: &str) {
        if self.is_terminal && self.shown.elapsed() >= PACE {
            say(&format!("\r\x1b[K  {text}"));
            (self.shown, self.is_open) = (Instant::now(), true);
        }
    }

    /// Ends the line that shows progress.
    pub fn close(&mut self) {
        if std::mem::take(&mut self.is_open) {
            say("\r\x1b[K");
        }
    }
}

impl Drop for Talk {
    fn drop(&mut self) {
        self.close();
    }
}

fn say(text: &str) {
    // Nobody can be told if stderr is closed.
    let _closed = std::io::stderr().write_all(text.as_bytes());
}
