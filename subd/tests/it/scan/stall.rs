//! That a scanner that stands still is noticed, by a file that really hangs.

use std::os::fd::AsFd;

use nix::sys::fanotify::Response;
use nix::sys::fanotify::{
    EventFFlags, Fanotify, FanotifyResponse, InitFlags, MarkFlags, MaskFlags,
};
use subd::scan::pace::StallDetector;

use super::*;

/// Nobody can open the file until this is told to let them.
struct Hang(Fanotify);

impl Hang {
    fn on(file: &Path) -> Self {
        let flags = EventFFlags::O_RDONLY | EventFFlags::O_CLOEXEC;
        let fanotify =
            Fanotify::init(InitFlags::FAN_CLASS_CONTENT | InitFlags::FAN_CLOEXEC, flags).unwrap();
        let (add, open) = (MarkFlags::FAN_MARK_ADD, MaskFlags::FAN_OPEN_PERM);
        let here = fs::File::open(file.parent().unwrap()).unwrap();
        fanotify.mark(add, open, here.as_fd(), Some(file)).unwrap();
        Self(fanotify)
    }

    /// Lets go whoever hangs, and all who come.
    fn release(self) {
        for event in self.0.read_events().unwrap() {
            let answer = FanotifyResponse::new(event.fd().unwrap(), Response::FAN_ALLOW);
            self.0.write_response(answer).unwrap();
        }
    }
}

#[tokio::test]
async fn a_file_that_hangs_is_named_until_the_scanner_moves_again() {
    let pace = Pace {
        metadata_interval_min: Duration::from_millis(50),
        metadata_interval_max: Duration::from_millis(50),
        stall_min: Duration::from_millis(300),
        ..on_demand()
    };
    let fixture = Fixture::with(ScanSettings::default(), &[], pace, |at| {
        fs::create_dir(at.join("d")).unwrap();
        fs::write(at.join("d/before"), "b").unwrap();
    });
    fixture.settle().await;
    fs::write(fixture.at("d/.hangs"), "h").unwrap();
    let hang = Hang::on(&fixture.at("d/.hangs"));
    fs::rename(fixture.at("d/.hangs"), fixture.at("d/hangs")).unwrap();

    let mut watch = StallDetector::default();
    let mut until = async |stalled: Option<&str>| {
        testing::eventually_async("the stall is noticed", async || {
            fixture.scanner.stalled(&mut watch).as_deref() == stalled
        })
        .await;
    };
    until(Some("the metadata pass is at /d/hangs")).await;
    hang.release();
    until(None).await;
    fixture.assert_exact().await;
}
