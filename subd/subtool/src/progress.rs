//! Progress on stderr.

use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

/// The shortest time between two updates of the progress.
const INTERVAL_MIN: Duration = Duration::from_millis(250);

/// Prints stages always, and progress on a terminal only.
#[derive(Debug)]
pub struct Progress {
    is_terminal: bool,
    shown: Instant,
    is_line_open: bool,
    stage: String,
}

impl Default for Progress {
    fn default() -> Self {
        let is_terminal = std::io::stderr().is_terminal();
        Self { is_terminal, shown: Instant::now(), is_line_open: false, stage: String::new() }
    }
}

impl Progress {
    /// Prints the stage, unless it was printed last.
    pub fn stage(&mut self, text: &str) {
        if self.stage != text {
            self.close();
            print(&format!("{text}\n"));
            text.clone_into(&mut self.stage);
        }
    }

    /// Shows the progress in the present stage.
    pub fn show(&mut self, text: &str) {
        if self.is_terminal && self.shown.elapsed() >= INTERVAL_MIN {
            print(&format!("\r\x1b[K  {text}"));
            (self.shown, self.is_line_open) = (Instant::now(), true);
        }
    }

    /// Ends the line that shows progress.
    pub fn close(&mut self) {
        if std::mem::take(&mut self.is_line_open) {
            print("\r\x1b[K");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.close();
    }
}

fn print(text: &str) {
    // A closed stderr cannot be reported.
    let _closed = std::io::stderr().write_all(text.as_bytes());
}
