//! Images that failed their health checks, as the history of the dominator remembers them.

use api::subd::UpdateOutcome;
use dominator::core::sub::UndoneUpdate;
use model::image::ImageName;

use super::World;

impl World {
    /// Notes that an operator retries what failed on a machine.
    pub(super) fn note_retry(&mut self, host: usize) {
        let Some(driver) = &self.drivers[host] else { return };
        let image = ImageName::new(&self.machines[host].required_image).unwrap();
        if let Some(undone) = driver.sub.undone(&image) {
            self.retried.insert((host, undone.update_id));
        }
    }

    /// True if the machine has `image`, and its required image failed its health check there, or
    /// has computed files whose content is not known.
    pub(super) fn is_kept_at(&self, host: usize, image: &ImageName) -> bool {
        // A driver that was told so when it started keeps to it, also if the machine reports later
        // that it got yet another image before.
        let required = ImageName::new(self.required(host)).unwrap();
        let driver = self.drivers[host].as_ref();
        let is_undone = driver.is_some_and(|driver| driver.sub.undone(&required).is_some());
        (is_undone || self.lacks_content(host))
            && self.must_be_known(host).report.last_image.as_ref() == Some(image)
    }

    /// Remembers the last update that failed its health check, as the history does.
    pub(super) fn note_undone(&mut self, host: usize, update_id: u64, outcome: &UpdateOutcome) {
        let Some(Some(image)) = self.ordered.get(&host).cloned() else { return };
        match outcome {
            UpdateOutcome::Undone(why) => {
                self.undone.insert(host, UndoneUpdate { update_id, image, why: why.clone() });
            }
            UpdateOutcome::Done => {
                self.undone.remove(&host);
            }
            _ => {}
        }
    }
}
