//! A copy of a store that a change is made on and disturbed, and what is expected of it then.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use imageserver::store::Store;
use model::object::Algorithm;
use tempfile::TempDir;

use crate::calls::{Call, Fault, Kind, disturb, list};
use crate::change::{Change, expect_whole, names};

/// Names the store to the program that changes it.
pub const ACT: &str = "IMAGESERVER_CRASH_ACT";

/// Names the change to it.
pub const CHANGE: &str = "IMAGESERVER_CRASH_CHANGE";

/// How many points are tried of each family if nobody says so.
const POINTS: usize = 24;

/// How many failures are shown.
const SHOWN_MAX: usize = 10;

/// Where memory is a file-system, so that nothing waits for a disk.
const MEMORY: &str = "/dev/shm";

/// What the tests of one change share.
pub struct Lab {
    /// What is done.
    pub change: &'static Change,
    place: TempDir,
    next: AtomicUsize,
    /// The calls of the change, in order.
    pub calls: Vec<Call>,
}

/// How a program says that the change went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    Done,
    Refused,
    /// It was killed.
    Nothing,
}

/// What may be in the quarantine afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aside {
    Nothing,
    /// What no image needed, and lost its content with the power.
    Unneeded,
}

impl Lab {
    /// Prepares the store, and makes the change once, undisturbed.
    pub fn open(change: &'static Change) -> Self {
        let mut builder = tempfile::Builder::new();
        let place = builder.prefix("crash.").tempdir_in(MEMORY).or_else(|_| builder.tempdir());
        let place = place.unwrap();
        change.prepare(&place.path().join("template"));
        let mut lab = Self { change, place, next: AtomicUsize::new(0), calls: Vec::new() };
        let data = lab.copy();
        let (output, calls) = list(&lab.program(&data), &lab.free_path());
        assert_eq!(told(&output), Ok(Told::Done), "{output:?}");
        judge(change, &data, Told::Done, Aside::Nothing).unwrap();
        let mut objects = entries(&data.join("objects/blake3")).into_iter();
        let is_packed = |path: PathBuf| path.extension().is_some();
        let has_packed = objects.any(|place| entries(&place).into_iter().any(is_packed));
        assert_eq!(has_packed, change.packed > 0);
        lab.calls = calls;
        let count = |kind| lab.calls.iter().filter(|call| call.kind == kind).count();
        let (changes, looks) = (count(Kind::Change), count(Kind::Look));
        println!("{}: changes something in {changes} calls, looks in {looks}", change.name);
        lab
    }

    /// The store before the change.
    pub fn template(&self) -> PathBuf {
        self.place.path().join("template")
    }

    /// A path where nothing is.
    pub fn free_path(&self) -> PathBuf {
        self.place.path().join(self.next.fetch_add(1, Ordering::Relaxed).to_string())
    }

    fn copy(&self) -> PathBuf {
        let data = self.free_path();
        copy(&self.template(), &data);
        data
    }

    /// The program that makes the change in `data`.
    pub fn program(&self, data: &Path) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env(ACT, data).env(CHANGE, self.change.name);
        command
    }

    /// The calls of one kind.
    pub fn of(&self, kind: Kind) -> Vec<Call> {
        self.calls.iter().filter(|call| call.kind == kind).cloned().collect()
    }

    /// Tries a sample of `all`, several at once.
    ///
    /// # Errors
    ///
    /// What went wrong at the first points that failed.
    pub fn each<T: Display + Sync>(
        &self,
        family: &str,
        all: Vec<T>,
        attempt: impl Fn(&T) -> Result<(), String> + Sync,
    ) -> Result<(), String> {
        let total = all.len();
        let points = sample(all);
        let next = AtomicUsize::new(0);
        let failed = Mutex::new(Vec::new());
        let work = || {
            while let Some(point) = points.get(next.fetch_add(1, Ordering::Relaxed)) {
                let done = catch_unwind(AssertUnwindSafe(|| attempt(point)));
                if let Err(why) = done.unwrap_or_else(|_| Err("the test panicked".to_owned())) {
                    failed.lock().unwrap().push(format!("{point}: {why}"));
                }
            }
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
        let failed = failed.into_inner().unwrap();
        let (name, tried) = (self.change.name, points.len());
        println!("{name}, {family}: {tried} of {total} points, {} wrong", failed.len());
        if failed.is_empty() {
            return Ok(());
        }
        let shown = failed.iter().take(SHOWN_MAX).map(String::as_str).collect::<Vec<_>>();
        Err(format!("{} points failed, such as\n{}", failed.len(), shown.join("\n")))
    }

    fn every(&self, kind: Kind, fault: Fault) -> Result<(), String> {
        self.each(&format!("{fault:?} of a {kind:?}"), self.of(kind), |call| {
            let data = self.copy();
            let output = disturb(&self.program(&data), &self.free_path(), call, fault)?;
            judge(self.change, &data, told(&output)?, Aside::Nothing)?;
            std::fs::remove_dir_all(data).map_err(|error| error.to_string())
        })
    }
}

/// Kills the program at each call that changes something.
pub fn kill(lab: &Lab) -> Result<(), String> {
    lab.every(Kind::Change, Fault::Kill)
}

/// Lets each call that changes something fail with EIO.
pub fn io_error(lab: &Lab) -> Result<(), String> {
    lab.every(Kind::Change, Fault::Io)
}

/// Lets each call that changes something fail with ENOSPC.
pub fn full_disk(lab: &Lab) -> Result<(), String> {
    lab.every(Kind::Change, Fault::Space)
}

/// Lets each call that looks at something fail with EIO.
pub fn io_error_of_a_look(lab: &Lab) -> Result<(), String> {
    lab.every(Kind::Look, Fault::Io)
}

/// What the program said. It must say more of a refusal than that there was one.
pub fn told(output: &Output) -> Result<Told, String> {
    use std::os::unix::process::ExitStatusExt as _;
    let text = String::from_utf8_lossy(&output.stdout);
    if output.status.signal() == Some(9) {
        return Ok(Told::Nothing);
    }
    match text.lines().collect::<Vec<_>>()[..] {
        ["done"] if output.status.success() => Ok(Told::Done),
        [line] if output.status.success() => {
            let clear = [
                "refused: cannot ",
                "refused: no space left to ",
                "refused: nothing is collected, because ",
                "refused: the collection failed: ",
            ];
            match clear.iter().any(|start| line.starts_with(start)) {
                true => Ok(Told::Refused),
                false => Err(format!("it says no more than: {line}")),
            }
        }
        _ => Err(format!("{output:?}")),
    }
}

/// Opens the store in `data` again, looks at all of it, and makes the change once more.
///
/// # Errors
///
/// What is not as it must be.
pub fn judge(change: &Change, data: &Path, told: Told, aside: Aside) -> Result<(), String> {
    let store = open(data)?;
    let images = names(&store);
    match told {
        Told::Done if images == change.after => {}
        Told::Refused if images == change.before => {}
        Told::Nothing if images == change.before || images == change.after => {}
        _ => return Err(format!("{told:?}, and there are {images:?}")),
    }
    expect_whole(&store)?;
    expect_tidy(data, aside)?;
    change.make(&store).map_err(|why| format!("the second time: {why}"))?;
    drop(store);
    let store = open(data)?;
    if names(&store) != change.after {
        return Err(format!("after the second time there are {:?}", names(&store)));
    }
    change.expect_gone(&store)?;
    expect_whole(&store)?;
    expect_tidy(data, aside)?;
    expect_sound(&data.join("objects"))
}

fn open(data: &Path) -> Result<Arc<Store>, String> {
    Store::open(data).map(Arc::new).map_err(|error| format!("it is not opened: {error:?}"))
}

/// Nothing is left of what was begun.
fn expect_tidy(data: &Path, aside: Aside) -> Result<(), String> {
    let empty: &[&str] = match aside {
        Aside::Nothing => &["incoming", "quarantine"],
        Aside::Unneeded => &["incoming"],
    };
    for directory in empty {
        let left: Vec<PathBuf> = entries(&data.join(directory));
        if !left.is_empty() {
            return Err(format!("this is left: {left:?}"));
        }
    }
    let known = [
        "directories",
        "images",
        "incoming",
        "leases",
        "lock",
        "objects",
        "quarantine",
        "unsynced",
    ];
    let is_known = |path: &PathBuf| known.iter().any(|name| path.ends_with(name));
    match entries(data).into_iter().find(|path| !is_known(path)) {
        None => Ok(()),
        Some(path) => Err(format!("this is left: {path:?}")),
    }
}

/// Every file is what its name says. This shares no code with the store.
fn expect_sound(objects: &Path) -> Result<(), String> {
    for directory in entries(&objects.join("blake3")) {
        for path in entries(&directory) {
            let corrupt = || Err(format!("{} is corrupt", path.display()));
            let bytes = std::fs::read(&path).unwrap();
            let content = match path.extension() {
                None => bytes,
                Some(_) => match unpacked(&bytes) {
                    Some(content) => content,
                    None => return corrupt(),
                },
            };
            if path.file_stem().unwrap() != Algorithm::Blake3.digest(&content).hex().as_str() {
                return corrupt();
            }
        }
    }
    Ok(())
}

/// The content of a packed file: behind its head are chunks of content or zstd frames.
fn unpacked(file: &[u8]) -> Option<Vec<u8>> {
    let mut rest = file.get(42..)?;
    let mut content = Vec::new();
    while let Some((head, behind)) = rest.split_first_chunk::<8>() {
        let length = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().unwrap()) as usize;
        let chunk = behind.get(..length(4))?;
        match length(0) == chunk.len() {
            true => content.extend_from_slice(chunk),
            false => content.extend(zstd::decode_all(chunk).ok()?),
        }
        rest = &behind[chunk.len()..];
    }
    rest.is_empty().then_some(content)
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// Copies a directory.
pub fn copy(from: &Path, to: &Path) {
    let done = Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
    assert!(done.success(), "cp");
}

/// Some of `all`, spread evenly, or all, or one, as the environment says.
fn sample<T: Display>(all: Vec<T>) -> Vec<T> {
    if let Ok(only) = std::env::var("CRASH_POINT") {
        return all.into_iter().filter(|one| one.to_string() == only).collect();
    }
    let count = match std::env::var("CRASH_POINTS").as_deref() {
        Ok("all") => return all,
        Ok(text) => text.parse().expect("CRASH_POINTS is a number, or all"),
        Err(_) => POINTS,
    };
    let total = all.len();
    if total <= count {
        return all;
    }
    let is_chosen = |index: &usize| (index * count) % total < count;
    all.into_iter().enumerate().filter(|(index, _)| is_chosen(index)).map(|(_, one)| one).collect()
}
