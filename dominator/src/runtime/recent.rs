//! Values that were just made: machines that are alike need the same plan and the same list of
//! changes, which are made once and held once.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use api::planning::{PlanJob, Planned};
use api::subd::ScanReport;
use model::filter::Patterns;
use model::image::computed::ComputedFiles;
use model::lock::locked;
use model::object::ObjectId;
use model::plan::RefusedChanges;

/// The most plans that are held. A fleet has few images; what else differs, differs for one
/// machine.
const PLANS_MAX: usize = 64;

/// The most operations of all plans that are held, except that the last plan is always held.
const OPERATIONS_MAX: usize = 200_000;

#[derive(Debug)]
struct RecentEntry<K, V> {
    key: K,
    value: V,
    size: usize,
    used: Instant,
}

/// The values that were used last, by key.
#[derive(Debug)]
pub struct Recent<K, V> {
    /// The one that was used last comes last.
    entries: Mutex<VecDeque<RecentEntry<K, V>>>,
    count_max: usize,
    /// The largest sum of sizes, except that the last value is always held.
    size_max: usize,
}

impl<K, V: Clone> Recent<K, V> {
    pub fn new(count_max: usize, size_max: usize) -> Self {
        Self { entries: Mutex::default(), count_max, size_max }
    }

    /// Returns the value whose key `is_wanted`.
    pub fn find(&self, is_wanted: impl Fn(&K) -> bool) -> Option<V> {
        find(&mut locked(&self.entries), |key, _| is_wanted(key))
    }

    /// Returns a value that `is_wanted`.
    fn find_value(&self, is_wanted: impl Fn(&V) -> bool) -> Option<V> {
        find(&mut locked(&self.entries), |_, value| is_wanted(value))
    }

    /// Forgets the values that were not used for as long as this.
    pub fn forget_unused(&self, longest: Duration) {
        locked(&self.entries).retain(|entry| entry.used.elapsed() < longest);
    }
}

fn find<K, V: Clone>(
    entries: &mut VecDeque<RecentEntry<K, V>>,
    is_wanted: impl Fn(&K, &V) -> bool,
) -> Option<V> {
    let at = entries.iter().position(|entry| is_wanted(&entry.key, &entry.value))?;
    let mut found = entries.remove(at)?;
    found.used = Instant::now();
    let value = found.value.clone();
    entries.push_back(found);
    Some(value)
}

impl<K: PartialEq, V: Clone> Recent<K, V> {
    /// Adds a value. Returns it, or the one that another caller has added meanwhile.
    pub fn add(&self, key: K, value: V, size: usize) -> V {
        let mut entries = locked(&self.entries);
        if let Some(known) = find(&mut entries, |known, _| *known == key) {
            return known;
        }
        entries.push_back(RecentEntry { key, value: value.clone(), size, used: Instant::now() });
        let mut sum: usize = entries.iter().map(|entry| entry.size).sum();
        while entries.len() > self.count_max || (sum > self.size_max && entries.len() > 1) {
            sum -= entries.pop_front().map_or(0, |oldest| oldest.size);
        }
        value
    }
}

/// All that a plan depends on: trees and images by their digests, so that none is kept alive.
#[derive(Debug, PartialEq)]
struct PlanInput {
    tree: ObjectId,
    image: ObjectId,
    computed: Arc<ComputedFiles>,
    scan: Arc<ScanReport>,
    exclusions: Patterns,
    refused: Arc<RefusedChanges>,
}

#[derive(Debug)]
pub struct Plans(Recent<PlanInput, Planned>);

impl Default for Plans {
    fn default() -> Self {
        Self(Recent::new(PLANS_MAX, OPERATIONS_MAX))
    }
}

impl Plans {
    /// Returns the plan that `job` would give, if it was made lately.
    pub fn find(&self, job: &PlanJob) -> Option<Planned> {
        let found = self.0.find(|input| {
            (input.tree, input.image) == (job.tree.digest(), job.image.digest)
                && *input.scan == *job.scan
                && input.computed == job.computed
                && input.exclusions == job.exclusions
                && input.refused == job.refused
        })?;
        Some(Planned { key: job.key, ..found })
    }

    /// Holds what `job` gave, and returns it. Machines that differ in what does not matter here,
    /// such as in their mount points, have other inputs and the same plan, which is held once.
    pub fn add(&self, job: &PlanJob, planned: Planned) -> Planned {
        let is_same =
            |known: &Planned| known.digest == planned.digest && known.plan == planned.plan;
        let planned = match self.0.find_value(is_same) {
            Some(Planned { plan, needs, computed, objects, .. }) => {
                Planned { plan, needs, computed, objects, ..planned }
            }
            None => planned,
        };
        let input = PlanInput {
            tree: job.tree.digest(),
            image: job.image.digest,
            computed: Arc::clone(&job.computed),
            scan: Arc::clone(&job.scan),
            exclusions: job.exclusions.clone(),
            refused: Arc::clone(&job.refused),
        };
        self.0.add(input, planned.clone(), planned.plan.operations.len());
        planned
    }

    /// Forgets the plans that were not used for as long as this.
    pub fn forget_unused(&self, longest: Duration) {
        self.0.forget_unused(longest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use api::planning::PlanKey;
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
            signers: Vec::new(),
        };
        let image = Arc::new(RequiredImage::new(content, image));
        let scope = Scope::of(&ScanSettings::default(), &[]);
        PlanJob {
            key: PlanKey { image: image.digest, scan, computed: 0 },
            scan: Arc::new(ScanReport::of(scope, &tree)),
            tree,
            exclusions: Patterns::new::<&str>([]).unwrap(),
            image,
            computed: Arc::default(),
            refused: Arc::default(),
        }
    }

    #[test]
    fn equal_machines_share_a_plan_and_others_do_not() {
        let plans = Plans::default();
        let one = job("a", "b", 1);
        assert!(plans.find(&one).is_none());
        let planned = plans.add(&one, one.run().unwrap());
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
        // It is another machine with the same plan.
        let same = plans.add(&other, other.run().unwrap());
        assert_eq!(same.digest, planned.digest);
        assert!(Arc::ptr_eq(&same.plan, &planned.plan));
        assert!(Arc::ptr_eq(&same.needs, &planned.needs));
        assert!(Arc::ptr_eq(&same.objects, &planned.objects));
        let mut other = job("a", "b", 1);
        other.exclusions = Patterns::new(["/x"]).unwrap();
        assert!(plans.find(&other).is_none());
    }

    #[test]
    fn only_the_plans_of_most_use_are_kept() {
        let plans = Plans::default();
        let often = job("often", "b", 1);
        plans.add(&often, often.run().unwrap());
        for number in 0..2 * PLANS_MAX {
            let once = job(&format!("once-{number}"), "b", 1);
            plans.add(&once, once.run().unwrap());
            assert!(plans.find(&often).is_some());
        }
        assert!(plans.find(&job("once-0", "b", 1)).is_none());
        assert_eq!(plans.0.entries.lock().unwrap().len(), PLANS_MAX);
    }

    #[test]
    fn plans_that_nobody_uses_are_forgotten() {
        let plans = Plans::default();
        let job = job("a", "b", 1);
        plans.add(&job, job.run().unwrap());
        plans.forget_unused(Duration::from_secs(3_600));
        assert!(plans.find(&job).is_some());
        plans.forget_unused(Duration::ZERO);
        assert!(plans.find(&job).is_none());
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
            plans.add(&job, planned);
            assert_eq!(plans.0.entries.lock().unwrap().len(), 1);
            assert!(plans.find(&job).is_some());
        }
    }
}
