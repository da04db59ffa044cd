//! `dom-provisioner-command` runs commands.
//!
//! ```json
//! {"check": ["/usr/local/sbin/has-user", "ann"], "apply": ["/usr/sbin/useradd", "ann"],
//!  "destroy": ["/usr/sbin/userdel", "ann"]}
//! ```
//!
//! `check`, if there is one, exits with 0 if nothing is to be done. `apply` makes or changes the
//! resource; it is run again after a crash. Both get the resource as JSON on standard input. If
//! `apply`, or else `check`, prints a JSON object, that is the outputs.

use std::io::{Read, Write as _};
use std::process::{Command, Stdio};

use model::display::safe_text;
use provisioning::protocol::{Operation, Outputs};
use serde::Deserialize;

use crate::{Item, Provisioner, specification};

/// How much a command may print, in bytes.
const PRINTED_BYTES_MAX: u64 = 256 << 10;

/// Runs commands.
#[derive(Debug)]
pub struct Commands;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Specification {
    check: Option<Vec<String>>,
    apply: Vec<String>,
    destroy: Option<Vec<String>>,
}

/// How a command ended.
struct Ended {
    is_good: bool,
    printed: Vec<u8>,
    /// What is wrong, if it did not end well.
    error: String,
}

impl Provisioner for Commands {
    fn plan(&self, item: &Item, previous: &[Item]) -> Result<(Operation, String), String> {
        let spec: Specification = specification(item)?;
        let (op, verb) = match previous.is_empty() {
            true => (Operation::Create, "make"),
            false => (Operation::Update, "change"),
        };
        let is_repeated = !previous.is_empty() && previous.iter().all(|old| old.key == item.key);
        match &spec.check {
            Some(check) if run("check", check, item)?.is_good => {
                Ok((Operation::None, "it is as asked for".to_owned()))
            }
            // Its drift is asked about.
            None if is_repeated => {
                Ok((Operation::None, "without `check` it is not known how it is".to_owned()))
            }
            _ => Ok((op, format!("{verb} it with {}", spec.apply.join(" ")))),
        }
    }

    fn make(&self, item: &Item, _previous: &[Item]) -> Result<Outputs, String> {
        let spec: Specification = specification(item)?;
        if let Some(check) = &spec.check {
            let checked = run("check", check, item)?;
            if checked.is_good {
                return Ok(outputs(&checked.printed));
            }
        }
        let applied = run("apply", &spec.apply, item)?;
        match applied.is_good {
            true => Ok(outputs(&applied.printed)),
            false => Err(applied.error),
        }
    }

    fn destroy(&self, item: &Item) -> Result<(), String> {
        let spec: Specification = specification(item)?;
        let Some(destroy) = &spec.destroy else {
            return Err("its spec has no command `destroy`".to_owned());
        };
        let ended = run("destroy", destroy, item)?;
        if ended.is_good { Ok(()) } else { Err(ended.error) }
    }
}

fn outputs(printed: &[u8]) -> Outputs {
    serde_json::from_slice(printed).unwrap_or_default()
}

/// Runs one of the commands.
fn run(name: &str, line: &[String], item: &Item) -> Result<Ended, String> {
    let Some((program, arguments)) = line.split_first() else {
        return Err(format!("spec: the command `{name}` is empty"));
    };
    if !program.starts_with('/') {
        return Err(format!("spec: `{name}` does not begin with the absolute path of a program"));
    }
    let failed = |error: std::io::Error| format!("{name}: {program}: {error}");
    let input = serde_json::to_vec(item).map_err(|error| error.to_string())?;
    let mut child = Command::new(program)
        .args(arguments)
        .current_dir("/")
        .env("RESOURCE_ID", &item.id)
        .env("RESOURCE_KEY", &item.key)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let (printed, complaint) = std::thread::scope(|scope| {
        scope.spawn(move || {
            // The command need not read it.
            let _unread = stdin.map(|mut pipe| pipe.write_all(&input));
        });
        let complaint = scope.spawn(move || read(stderr));
        let printed = read(stdout);
        (printed, complaint.join().unwrap_or_default())
    });
    let status = child.wait().map_err(failed)?;
    let complaint = String::from_utf8_lossy(&complaint);
    let last = complaint.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let error = format!("{name}: {status}: {}", safe_text(last.trim(), 1_000));
    Ok(Ended { is_good: status.success(), printed, error })
}

/// Reads what fits, and closes the pipe: a command that prints more is ended by that.
fn read(pipe: Option<impl Read>) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        let _broken = pipe.take(PRINTED_BYTES_MAX).read_to_end(&mut bytes);
    }
    bytes
}
