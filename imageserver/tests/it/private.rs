//! Which objects only private images have: against a naive model, and while images are added.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use imageserver::store::Store;
use imageserver::store::image_trees::check_tree;
use imageserver::store::private_images::{IndexCheck, PrivateImages};
use imageserver::store::record::Record;
use model::image::{Image, ImageName, Notes};
use model::object::ObjectId;
use model::tree::Tree;
use proptest::prelude::*;

use crate::fixture::{ALGORITHM, directories, image_of, name, stored, tree_of};

/// The directories of the images; those of [`PRIVATE`] and below are private.
const DIRECTORIES: [&str; 5] = ["base", "db", "db/prod", "db-2", "sec/x"];
const PRIVATE: [&str; 2] = ["db", "sec"];

/// The contents of files.
const CONTENTS: [&[u8]; 5] = [b"a", b"b", b"c", b"d", b"e"];

/// Files as (directory, file, content), and whether there is a build log.
type Shape = (Vec<(u8, u8, u8)>, Option<u8>);

/// A change of the images of a store.
#[derive(Clone, Debug)]
enum Step {
    Add(usize, Shape),
    Delete(usize),
    Expire(usize),
    Drop(usize),
    Relog(usize, Option<u8>),
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    let content = 0..CONTENTS.len() as u8;
    let files = prop::collection::vec((0..3_u8, 0..3_u8, content.clone()), 0..6);
    let shape = (files, prop::option::of(content.clone()));
    prop_oneof![
        4 => (0..DIRECTORIES.len(), shape).prop_map(|(at, shape)| Step::Add(at, shape)),
        2 => (0..9_usize).prop_map(Step::Delete),
        1 => (0..9_usize).prop_map(Step::Expire),
        1 => (0..9_usize).prop_map(Step::Drop),
        1 => (0..9_usize, prop::option::of(content)).prop_map(|(at, log)| Step::Relog(at, log)),
        1 => Just(Step::Restart),
    ]
}

fn put(store: &Store, content: &[u8]) -> ObjectId {
    let id = ALGORITHM.digest(content);
    let mut receiving = store.objects.receive(id, content.len() as u64).unwrap();
    receiving.write(content).unwrap();
    receiving.finish().unwrap().wait().unwrap();
    id
}

/// Adds an image, and returns the objects of its tree.
fn add(store: &Store, image: &str, (files, log): &Shape) -> BTreeSet<ObjectId> {
    let files: BTreeMap<String, &[u8]> = files
        .iter()
        .map(|(directory, file, content)| {
            (format!("/{directory}/{file}"), CONTENTS[usize::from(*content)])
        })
        .collect();
    let files: Vec<(&str, &[u8])> =
        files.iter().map(|(path, content)| (path.as_str(), *content)).collect();
    let (tree, contents) = (tree_of(&files), files.iter().map(|(_, content)| *content));
    let contents: Vec<&[u8]> = contents.collect();
    let build_log = log.map(|content| put(store, CONTENTS[usize::from(content)]));
    let expires_at = Some(model::tree::Time { seconds: 1, nanoseconds: 0 });
    let notes = Notes { build_log, expires_at, ..Notes::default() };
    add_tree(store, image, &tree, &contents, notes)
}

/// Adds an image of `tree`, whose files have these contents, and returns the objects of the tree.
fn add_tree(
    store: &Store,
    image: &str,
    tree: &Tree,
    contents: &[&[u8]],
    notes: Notes,
) -> BTreeSet<ObjectId> {
    let mut objects: BTreeSet<ObjectId> =
        contents.iter().map(|content| put(store, content)).collect();
    objects.extend(directories(tree).iter().map(|(_, encoding)| put(store, encoding)));
    let content = image_of(image, tree);
    let totals = check_tree(&*store.objects, &content).unwrap().totals;
    store.add_image(&Record { image: Image { content, notes }, totals }).unwrap();
    objects
}

fn open(data: &Path) -> Store {
    let mut store = Store::open(data).unwrap();
    store.keep_private(PRIVATE.map(name).to_vec());
    store
}

/// The images as they must be: the objects of their trees, and the build log.
type Model = BTreeMap<ImageName, (BTreeSet<ObjectId>, Option<ObjectId>)>;

/// Who reads: nobody, the owners of one directory, or those of both.
const READERS: [&[&str]; 5] = [&[], &["db"], &["db/prod"], &["sec/x"], &["db", "db/prod", "sec/x"]];

/// The objects that a reader may read: those of each image that is public or that they may read.
fn expected(model: &Model, reader: &[&str]) -> BTreeSet<ObjectId> {
    let is_for = |image: &ImageName| {
        let directory = image.directory().unwrap();
        !["db", "db/prod", "sec/x"].contains(&directory) || reader.contains(&directory)
    };
    let images = model.iter().filter(|(image, _)| is_for(image));
    images.flat_map(|(_, (objects, log))| objects.iter().chain(log)).copied().collect()
}

/// Which of `all` may be read, for each of [`READERS`].
fn readable(private: &PrivateImages, all: &BTreeSet<ObjectId>) -> [BTreeSet<ObjectId>; 5] {
    READERS.map(|reader| {
        let may = |directory: &ImageName| reader.contains(&directory.as_str());
        all.iter().filter(|id| private.is_readable(id, may)).copied().collect()
    })
}

/// A store, and what must be in it.
struct World {
    data: tempfile::TempDir,
    store: Option<Store>,
    model: Model,
    /// All objects that ever were.
    all: BTreeSet<ObjectId>,
    added: usize,
}

impl World {
    fn store(&self) -> &Store {
        self.store.as_ref().unwrap()
    }

    fn private(&self) -> &PrivateImages {
        self.store().private.as_ref().unwrap()
    }

    fn check(&self) -> IndexCheck {
        let store = self.store();
        self.private().check(&*store.objects, &store.images, &|| false)
    }

    /// The name of one of the images.
    fn choose(&self, number: usize) -> Option<ImageName> {
        self.model.keys().nth(number).cloned()
    }

    fn make(&mut self, step: Step) {
        match step {
            Step::Add(directory, shape) => {
                self.added += 1;
                let image = format!("{}/{}", DIRECTORIES[directory], self.added);
                let objects = add(self.store(), &image, &shape);
                let log = shape.1.map(|content| ALGORITHM.digest(CONTENTS[usize::from(content)]));
                self.all.extend(objects.iter().copied().chain(log));
                self.model.insert(name(&image), (objects, log));
            }
            Step::Delete(number) | Step::Expire(number) | Step::Drop(number) => {
                let Some(image) = self.choose(number) else { return };
                let images = &self.store().images;
                match step {
                    Step::Delete(_) => images.delete(&image, "deleted\n").unwrap(),
                    Step::Drop(_) => images.drop_copy(&image).unwrap(),
                    _ => assert!(images.expire(&image, "expired\n", |at| at.is_some()).unwrap()),
                }
                self.model.remove(&image);
            }
            Step::Relog(number, content) => {
                let Some(image) = self.choose(number) else { return };
                let log = content.map(|content| put(self.store(), CONTENTS[usize::from(content)]));
                self.all.extend(log);
                let digest = self.store().images.digest(&image).unwrap();
                let mut notes = self.store().images.get(&image).unwrap().image.notes;
                notes.build_log = log;
                self.store().images.replace_notes(&image, digest, &notes).unwrap();
                self.model.get_mut(&image).unwrap().1 = log;
            }
            Step::Restart => {
                self.store = None;
                self.store = Some(open(self.data.path()));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn the_index_is_that_of_the_images_whatever_happens(
        steps in prop::collection::vec(step(), 1..12),
    ) {
        let data = tempfile::tempdir().unwrap();
        let store = Some(open(data.path()));
        let (model, all) = Default::default();
        let mut world = World { data, store, model, all, added: 0 };
        for step in steps {
            let before = READERS.map(|reader| expected(&world.model, reader));
            let (is_addition, is_restart) =
                (matches!(step, Step::Add(..)), matches!(step, Step::Restart));
            world.make(step);
            let after = READERS.map(|reader| expected(&world.model, reader));
            // At once an addition is seen as a whole, and what ends shows nobody more.
            let now = readable(world.private(), &world.all);
            for ((now, before), after) in now.iter().zip(&before).zip(&after) {
                let either: BTreeSet<ObjectId> = before.union(after).copied().collect();
                prop_assert!(now.is_subset(&either));
                prop_assert!(!(is_addition || is_restart) || now == after);
            }
            let checked = world.check();
            prop_assert!(!(is_addition || is_restart) || checked == IndexCheck::Exact);
            prop_assert_eq!(readable(world.private(), &world.all), after);
            prop_assert_eq!(world.check(), IndexCheck::Exact);
        }
    }
}

#[test]
fn an_image_that_is_added_while_all_trees_are_read_is_not_forgotten() {
    let data = tempfile::tempdir().unwrap();
    let store = open(data.path());
    let private = store.private.as_ref().unwrap();
    let is_over = AtomicBool::new(false);
    let shape = |number: usize| -> Shape {
        let at = |shift: usize| u8::try_from(number >> shift & 1).unwrap();
        (vec![(0, 0, at(0)), (1, 1, 2 + at(1)), (2, at(2), 4)], None)
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut rebuilt = 0;
            while !is_over.load(Ordering::Relaxed) {
                let checked = private.check(&*store.objects, &store.images, &|| false);
                rebuilt += usize::from(checked == IndexCheck::Rebuilt);
            }
            assert!(rebuilt > 0, "nothing was read again");
        });
        for number in 0..400 {
            let directory = DIRECTORIES[number % 2];
            let image = format!("{directory}/{number}");
            let objects = add(&store, &image, &shape(number / 2));
            for id in &objects {
                let is_readable = private.is_readable(id, |one| one.as_str() == directory);
                assert!(is_readable, "{image} {id}");
            }
            // Its objects are those of nobody else, as often as not.
            store.images.delete(&name(&image), "deleted\n").unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
    });
    private.check(&*store.objects, &store.images, &|| false);
    let all: BTreeSet<ObjectId> =
        CONTENTS.iter().map(|content| ALGORITHM.digest(content)).collect();
    assert_eq!(readable(private, &all), [const { BTreeSet::new() }; 5]);
}

#[test]
fn a_file_that_is_the_encoding_of_a_directory_does_not_stand_for_it() {
    let data = tempfile::tempdir().unwrap();
    let store = open(data.path());
    let tree = tree_of(&[("/0/0", b"a")]);
    let below = directories(&tree).into_iter().find(|(id, _)| *id != tree.digest()).unwrap().1;
    add_tree(&store, "base/1", &tree_of(&[("/file", &below)]), &[&below], Notes::default());
    let all = add(&store, "base/2", &(vec![(0, 0, 0)], None));
    let are_readable = |store: &Store| {
        let private = store.private.as_ref().unwrap();
        all.iter().all(|id| private.is_readable(id, |_| false))
    };
    assert!(are_readable(&store));
    drop(store);
    assert!(are_readable(&open(data.path())));
}

#[test]
fn a_tree_that_cannot_be_read_hides_its_own_objects_until_it_can() {
    let data = tempfile::tempdir().unwrap();
    let store = open(data.path());
    let lost = add(&store, "base/lost", &(vec![(0, 0, 0), (1, 0, 1)], None));
    let whole = add(&store, "base/whole", &(vec![(2, 0, 2)], None));
    let path = |id: &ObjectId| stored(data.path(), id);
    let tree = tree_of(&[("/0/0", b"a"), ("/1/0", b"b")]);
    let below = directories(&tree).into_iter().find(|(id, _)| *id != tree.digest()).unwrap();
    drop(store);
    let kept = std::fs::read(path(&below.0)).unwrap();
    std::fs::remove_file(path(&below.0)).unwrap();

    let store = open(data.path());
    let private = store.private.as_ref().unwrap();
    let is_readable = |id: &ObjectId| private.is_readable(id, |_| false);
    assert!(private.is_incomplete());
    assert!(whole.iter().all(is_readable));
    assert!(!lost.iter().all(is_readable));
    let check = || private.check(&*store.objects, &store.images, &|| false);
    assert_eq!(check(), IndexCheck::Incomplete);
    assert_eq!(put(&store, &kept), below.0);
    assert_eq!(check(), IndexCheck::Rebuilt);
    assert!(lost.iter().all(is_readable) && !private.is_incomplete());
}
