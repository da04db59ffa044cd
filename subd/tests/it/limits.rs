//! That subd takes no more of the machine than it may, and how that is changed.
//!
//! `SUBD_RATE_SECONDS=30 cargo test -p subd --test it limits -- --nocapture` measures for longer,
//! so that too little is an error as well, and prints what was measured.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use api::subd::{
    GetConfiguration, Limits, Load, Poll, PollRequest, SetConfiguration, SetConfigurationRequest,
};
use subd::limits::Budgets;
use subd::limits::rates::{Ceilings, Speeds};

use crate::disk::Disk;
use crate::process::Process;

/// How long the normal run measures, in seconds.
const SECONDS: u64 = 3;

fn seconds() -> (Duration, bool) {
    let seconds = match std::env::var("SUBD_RATE_SECONDS") {
        Ok(number) => number.parse().unwrap(),
        Err(_) => SECONDS,
    };
    // Other tests may leave subd less than its share for a while.
    (Duration::from_secs(seconds), seconds >= 10)
}

fn limit_to(limits: Limits) -> SetConfigurationRequest {
    SetConfigurationRequest { scan: None, limits: Some(limits) }
}

fn scan_percent(percent: u8) -> Limits {
    Limits { scan_percent: Some(percent), ..Limits::default() }
}

async fn load(process: &Process) -> Load {
    process.client.call::<Poll>(&PollRequest::default()).await.unwrap().load
}

/// What the process has read from devices, in bytes.
fn read_bytes(process: &Process) -> u64 {
    let text = fs::read_to_string(format!("/proc/{}/io", process.child.id())).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("read_bytes: ")).unwrap();
    line.parse().unwrap()
}

/// Measures at what rate the process reads, and compares it with `limit`, in bytes per second.
async fn assert_rate(process: &Process, limit: f64) {
    let (time, and_no_less) = seconds();
    let (before, start) = (read_bytes(process), Instant::now());
    tokio::time::sleep(time).await;
    let rate = (read_bytes(process) - before) as f64 / start.elapsed().as_secs_f64();
    eprintln!("{rate:.0} bytes a second in {time:?}, of {limit:.0}: {:.3}", rate / limit);
    assert!(rate <= 1.1 * limit, "{rate} of {limit}");
    assert!(rate >= if and_no_less { 0.9 * limit } else { 1.0 }, "{rate} of {limit}");
}

/// Fills `root` with files of a megabyte, none of which can be packed.
fn fill(root: &Path, megabytes: u64) {
    let mut state = 1_u64;
    for number in 0..megabytes {
        let word = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state.to_le_bytes()
        };
        let content: Vec<u8> = std::iter::repeat_with(word).take(125_000).flatten().collect();
        fs::write(root.join(format!("f{number}")), content).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn device_reads_are_held_to_their_share_which_changes_at_run_time_and_is_kept() {
    let megabytes = 10 + seconds().0.as_secs() * 8;
    let disk = Disk::new((megabytes + 60) << 20);
    fill(&disk.root(), megabytes);
    disk.remount();
    // Four per cent of what the device is said to do.
    let flags = ["--insecure", "--device-speed", "100000000", "--scan-percent", "4"];
    let process = Process::start_with(&disk.root(), &flags);
    assert_eq!(load(&process).await.scan.limit, 4_000_000);
    // The first pass has what was saved up, and then its share.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_rate(&process, 4_000_000.0).await;
    process.client.call::<SetConfiguration>(&limit_to(scan_percent(2))).await.unwrap();
    assert_eq!(load(&process).await.scan.limit, 2_000_000);
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_rate(&process, 2_000_000.0).await;
    let used = load(&process).await.scan.used;
    assert!((1..=4_400_000).contains(&used), "{used}");
    let (_, metrics) = process.client.get("/metrics").await.unwrap();
    let metrics = String::from_utf8(metrics.to_vec()).unwrap();
    assert!(metrics.contains("subd_scan_limit 2000000"), "{metrics}");

    // Over the wire a ceiling can only be lowered.
    process.client.call::<SetConfiguration>(&limit_to(scan_percent(90))).await.unwrap();
    assert_eq!(load(&process).await.scan.limit, 4_000_000);
    process.client.call::<SetConfiguration>(&limit_to(scan_percent(1))).await.unwrap();
    assert_eq!(process.stop(), Some(0));
    let process = Process::start_with(&disk.root(), &flags);
    assert_eq!(load(&process).await.scan.limit, 1_000_000);
    let kept = process.client.call::<GetConfiguration>(&()).await.unwrap();
    assert_eq!(kept.limits, scan_percent(1));
    assert_eq!(process.stop(), Some(0));
}

#[tokio::test]
async fn the_content_pass_keeps_to_its_share_of_the_processor() {
    use model::filter::Patterns;
    use model::scope::ScanSettings;
    use std::sync::Arc;
    use subd::root::Root;
    use subd::scan::Scanner;
    use subd::scan::pace::Pace;

    let (time, and_no_less) = seconds();
    let place = tempfile::tempdir().unwrap();
    fill(place.path(), 20);
    let ceilings = Ceilings { cpu_percent: Some(10), ..Ceilings::NONE };
    let budgets = Arc::new(Budgets::new(ceilings, Limits::default(), Speeds::default()));
    let pace = Pace { content_pause: Duration::ZERO, ..Pace::default() };
    let root = Arc::new(Root::open(place.path()).unwrap());
    let (settings, none) = (ScanSettings::default(), Patterns::new([""; 0]).unwrap());
    let scanner = Scanner::start(root, none, settings, pace, Arc::clone(&budgets)).unwrap();
    scanner.rescan_now().await.unwrap();
    let start = Instant::now();
    let before = scanner.counters().hashed_bytes;
    tokio::time::sleep(time).await;
    assert!(scanner.counters().hashed_bytes > before);
    // Averages are over whole seconds; the first pass was not limited.
    let used = budgets.load().cpu.used as f64 / 1e6;
    eprintln!("{used:.3} of a core in {:?}, of 0.1", start.elapsed());
    assert!(used <= 0.13, "{used}");
    assert!(!and_no_less || used >= 0.085, "{used}");
}
