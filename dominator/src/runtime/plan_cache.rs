//! Plans that were just made: machines that have the same tree and must have the same image get the
//! same plan, which is made once and held once.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use api::subd::ScanReport;
use model::filter::Patterns;
use model::object::ObjectId;

use api::planning::{PlanJob, Planned};

/// How many plans are remembered. A fleet has few images, and whatever else differs, differs for
/// one machine.
const PLANS_MAX: usize = 64;

/// How many operations the remembered plans have together at most, but for the last one: they are
/// in memory when all machines are done with them.
const OPERATIONS_MAX: usize = 200_000;

/// All that a plan depends on: trees and images by their digests, so that none is kept alive.
#[derive(Debug)]
struct Made {
    tree: ObjectId,
    image: ObjectId,
    scan: Arc<ScanReport>,
    exclusions: Patterns,
    planned: Planned,
}

impl Made {
    fn operations(&self) -> usize {
        self.planned.plan.operations.len()
    }

    fn is_of(&self, job: &PlanJob) -> bool {
        (self.tree, self.image) == (job.tree.digest(), job.image.digest)
            && *self.scan == *job.scan
            && self.exclusions == job.exclusions
    }
}

#[derive(Debug, Default)]
pub struct Plans {
    /// The one that was of use last comes last.
    made: Mutex<VecDeque<Made>>,
}

impl Plans {
    /// The plan that `job` would give, if it was made lately.
    #[must_use]
    pub fn find(&self, job: &PlanJob) -> Option<Planned> {
        let mut made = self.made.lock().expect("no holder panics");
        let at = made.iter().position(|made| made.is_of(job))?;
        let found = made.remove(at)?;
        let planned = Planned { key: job.key, ..found.planned.clone() };
        made.push_back(found);
        Some(planned)
    }

    /// Remembers what `job` gave.
    pub fn keep(&self, job: &PlanJob, planned: &Planned) {
        let new = Made {
            tree: job.tree.digest(),
            image: job.image.digest,
            scan: Arc::clone(&job.scan),
            exclusions: job.exclusions.clone(),
            planned: planned.clone(),
        };
        let mut made = self.made.lock().expect("no holder panics");
        made.push_back(new);
        let mut operations: usize = made.iter().map(Made::operations).sum();
        while made.len() > PLANS_MAX || (operations > OPERATIONS_MAX && made.len() > 1) {
            operations -= made.pop_front().map_or(0, |oldest| oldest.operations());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use api::planning::PlanKey;
    use api::subd::ScanReport;
    use model::filter::Filter;
    use model::image::required::RequiredImage;
    use model::image::{Content, FORMAT, ImageName};
    use model::object::Algorithm;
    use model::path::TreePath;
    use model::scope::{ScanSettings, Scope};
    use model::tree::Tree;
    use model::tree::text::from_text;
    use model::trigger::Triggers;

    fn tree(name: &str) -> Tree {
        from_text(Algorithm::Blake3, &format!("d 755 0:0 /{name}\n")).unwrap()
    }

    fn job(have: &str, want: &str, scan: u64) -> PlanJob {
        let (tree, image) = (tree(have), tree(want));
        let content = Content {
            format: FORMAT,
            name: ImageName::new("base").unwrap(),
            root: image.digest(),
            filter: Some(Filter::new::<&str>([]).unwrap()),
            triggers: Triggers::default(),
            computed: Vec::new(),
            health_check: None,
        };
        let image = Arc::new(RequiredImage::new(content, image));
        let scope = Scope::of(&ScanSettings::default(), &[]);
        PlanJob {
            key: PlanKey { image: image.digest, scan },
            scan: Arc::new(ScanReport::of(scope, &tree)),
            tree,
            exclusions: Patterns::new::<&str>([]).unwrap(),
            image,
        }
    }

    #[test]
    fn equal_machines_share_a_plan_and_others_do_not() {
        let plans = Plans::default();
        let one = job("a", "b", 1);
        assert!(plans.find(&one).is_none());
        let planned = one.run().unwrap();
        plans.keep(&one, &planned);
        let found = plans.find(&job("a", "b", 7)).unwrap();
        assert_eq!(found.key, job("a", "b", 7).key);
        assert!(Arc::ptr_eq(&found.plan, &planned.plan));
        assert!(plans.find(&job("c", "b", 1)).is_none());
        assert!(plans.find(&job("a", "c", 1)).is_none());
        let mut other = job("a", "b", 1);
        let mut scan = ScanReport::clone(&other.scan);
        scan.kept_directories.push(TreePath::root());
        other.scan = Arc::new(scan);
        assert!(plans.find(&other).is_none());
        let mut other = job("a", "b", 1);
        other.exclusions = Patterns::new(["/x"]).unwrap();
        assert!(plans.find(&other).is_none());
    }

    #[test]
    fn only_the_plans_of_most_use_are_kept() {
        let plans = Plans::default();
        let often = job("often", "b", 1);
        plans.keep(&often, &often.run().unwrap());
        for number in 0..2 * PLANS_MAX {
            let once = job(&format!("once-{number}"), "b", 1);
            plans.keep(&once, &once.run().unwrap());
            assert!(plans.find(&often).is_some());
        }
        assert!(plans.find(&job("once-0", "b", 1)).is_none());
        assert_eq!(plans.made.lock().unwrap().len(), PLANS_MAX);
    }

    #[test]
    fn large_plans_are_kept_one_at_a_time() {
        let plans = Plans::default();
        for name in ["first", "second", "third"] {
            let job = job(name, "b", 1);
            let mut planned = job.run().unwrap();
            let mut plan = model::plan::Plan::clone(&planned.plan);
            plan.operations = vec![plan.operations[0].clone(); OPERATIONS_MAX / 2 + 1];
            planned.plan = Arc::new(plan);
            plans.keep(&job, &planned);
            assert_eq!(plans.made.lock().unwrap().len(), 1);
            assert!(plans.find(&job).is_some());
        }
    }
}
