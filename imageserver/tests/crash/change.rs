//! What is done to a store, by its own code and in one thread, and what may come of it.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use api::access::Owners;
use api::image_server::collection::CollectRequest;
use api::image_server::replication::ImageEnd;
use api::image_server::replication::directories::DirectoriesVersion;
use imageserver::collection::Collector;
use imageserver::core::collection::disk_pressure::Bounds;
use imageserver::core::directories::{Directories, DirectoryError, Made, Sums};
use imageserver::replication::image_steps;
use imageserver::store::contract::PendingStore;
use imageserver::store::directories::DirectoriesChangeError;
use imageserver::store::medium_reader::MediumReader;
use imageserver::store::record::Record;
use imageserver::store::{Store, error::StoreError};
use imageserver::store::{error::AdmissionError, image_trees::check_tree};
use model::display::error_chain;
use model::filter::Filter;
use model::image::{Content, FORMAT, Image, ImageName, Notes, computed_rules};
use model::object::{Algorithm, ObjectId};
use model::tree::{Child, Directory, File, Leaf, Metadata, Node, Time, Tree, TreeBuilder};
use model::trigger::Triggers;
use testing::strace::MARK;

use crate::trial;

const ALGORITHM: Algorithm = Algorithm::Blake3;

/// One kind of change.
#[derive(Debug)]
pub struct Change {
    /// What it is called.
    pub name: &'static str,
    /// What there is before it: images, and directories that were made, as `names` tells them.
    pub before: &'static [&'static str],
    /// Images that were deleted before it, and left their objects.
    deleted: &'static [&'static str],
    /// What there is after it.
    pub after: &'static [&'static str],
    /// How hard objects are packed that it stores: a level of zstd; 0 for not at all.
    pub packed: i32,
    /// True if what it makes must be on the medium when it ends.
    pub is_synced: bool,
    /// Makes it. It can be made again whatever became of the first time.
    make: fn(&Arc<Store>) -> Result<(), String>,
}

/// All kinds.
pub static CHANGES: &[Change] = &[
    Change {
        name: "add",
        before: &["base/1"],
        deleted: &[],
        after: &["base/1", "base/2"],
        packed: 0,
        is_synced: true,
        make: add,
    },
    Change {
        name: "pack",
        before: &["base/1"],
        deleted: &[],
        after: &["base/1", "base/2"],
        packed: 3,
        is_synced: true,
        make: add,
    },
    Change {
        name: "delete",
        before: &["base/1", "base/2"],
        deleted: &[],
        after: &["base/1"],
        packed: 0,
        is_synced: true,
        make: delete,
    },
    // What a replica does, by the word of its master.
    Change {
        name: "receive",
        before: &["base/1"],
        deleted: &[],
        after: &["base/1", "base/2"],
        packed: 0,
        is_synced: true,
        make: receive,
    },
    Change {
        name: "end",
        before: &["base/1", "base/2"],
        deleted: &[],
        after: &["base/1"],
        packed: 0,
        is_synced: true,
        make: end,
    },
    // That the name is taken is not seen in the list, so a missing sync would not be either.
    Change {
        name: "mark",
        before: &["base/1"],
        deleted: &[],
        after: &["base/1"],
        packed: 0,
        is_synced: false,
        make: mark,
    },
    Change {
        name: "renote",
        before: &["base/1"],
        deleted: &[],
        after: &["base/1"],
        packed: 0,
        is_synced: false,
        make: renote,
    },
    Change {
        name: "drop",
        before: &["base/1", "base/2"],
        deleted: &[],
        after: &["base/1"],
        packed: 0,
        is_synced: true,
        make: drop_copy,
    },
    Change {
        name: "mkdir",
        before: &["base/1"],
        deleted: &[],
        after: &["base/1", "directory web: group infra", "directory web/prod: group web"],
        packed: 0,
        is_synced: true,
        make: make_directory,
    },
    Change {
        name: "chown",
        before: &["base/1", "directory base: group infra"],
        deleted: &[],
        after: &["base/1", "directory base: group web"],
        packed: 0,
        is_synced: true,
        make: change_owner,
    },
    Change {
        name: "readers",
        before: &["base/1", "directory base: group infra"],
        deleted: &[],
        after: &["base/1", "directory base: group infra, read by db1"],
        packed: 0,
        is_synced: true,
        make: change_readers,
    },
    Change {
        name: "rmdir",
        before: &["base/1", "directory base: group infra", "directory web: nobody"],
        deleted: &["web/1"],
        after: &["base/1", "directory base: group infra"],
        packed: 0,
        is_synced: true,
        make: remove_directory,
    },
    // By the word of its master.
    Change {
        name: "owners",
        before: &["base/1", "directory base: group infra", "directory web: nobody"],
        deleted: &[],
        after: &["base/1", "directory base: group web", "directory lib: nobody"],
        packed: 0,
        is_synced: true,
        make: take_directories,
    },
    // An object that comes back with a power cut is collected again.
    Change {
        name: "collect",
        before: &["base/1"],
        deleted: &["base/2"],
        after: &["base/1"],
        packed: 0,
        is_synced: false,
        make: collect,
    },
];

impl Change {
    /// The change that is called so.
    fn called(name: &str) -> &'static Self {
        CHANGES.iter().find(|change| change.name == name).expect("the test knows the names")
    }

    /// Makes the store in `directory` as it is before the change.
    pub fn prepare(&self, directory: &Path) {
        let store = Store::open(directory).unwrap();
        for thing in self.before.iter().chain(self.deleted) {
            match thing.strip_prefix("directory ") {
                Some(directory) => prepare_directory(&store, directory),
                None => store_image(&store, thing).unwrap(),
            }
        }
        for image in self.deleted {
            store.images.delete(&name(image), "deleted by a test\n").unwrap();
        }
    }

    /// Makes the change, or makes it again.
    pub fn make(&self, store: &Arc<Store>) -> Result<(), String> {
        (self.make)(store)
    }

    /// Nothing is there of what only images that were deleted before needed.
    pub fn expect_gone(&self, store: &Store) -> Result<(), String> {
        for image in self.deleted.iter().filter(|_| self.name == "collect") {
            let (tree, mut objects) = tree_of(image);
            encodings(tree.root(), &mut objects);
            // The first is what all images have.
            for id in objects[1..].iter().map(|content| ALGORITHM.digest(content)) {
                if store.objects.size_bytes(&id).map_err(|error| error_chain(&error))?.is_some() {
                    return Err(format!("{id} is left, which only {image} needed"));
                }
            }
        }
        Ok(())
    }
}

/// The program that is disturbed: makes the change that the environment names in the store in
/// `directory`. Its last line says how that ended.
pub fn act(directory: &Path) -> ExitCode {
    let change = Change::called(&std::env::var(trial::CHANGE_VARIABLE).unwrap());
    let store = Arc::new(Store::open_packing(directory, change.packed).unwrap());
    let mark = || assert!(std::fs::symlink_metadata(MARK).is_err());
    mark();
    let made = change.make(&store);
    mark();
    // As a server does in the background, which hears that the disk gives it now.
    let mut reader = MediumReader::default();
    for id in store.objects.damaged_objects().all().keys() {
        store.objects.read_medium(id, &mut reader, &mut |_| true).unwrap();
    }
    // What could be read before can be read after, of this very store.
    if let Err(why) = expect_whole(&store) {
        println!("wrong: {why}");
    }
    match made {
        Ok(()) => println!("done"),
        Err(why) => println!("refused: {why}"),
    }
    ExitCode::SUCCESS
}

fn add(store: &Arc<Store>) -> Result<(), String> {
    store_image(store, "base/2")
}

fn delete(store: &Arc<Store>) -> Result<(), String> {
    match store.images.delete(&name("base/2"), "deleted by a test\n") {
        Ok(()) | Err(StoreError::Gone { .. }) => Ok(()),
        Err(error) => Err(error_chain(&error)),
    }
}

fn receive(store: &Arc<Store>) -> Result<(), String> {
    let image = upload(store, "base/2")?;
    // False if it was there already.
    image_steps::receive(store, image).map(drop).map_err(|error| error_chain(&error))
}

fn end(store: &Arc<Store>) -> Result<(), String> {
    let digest = content_of("base/2").digest();
    let ended =
        image_steps::end(store, &name("base/2"), digest, ImageEnd::Expired, "another server");
    // False if it was done before.
    ended.map(drop).map_err(|error| error_chain(&error))
}

fn mark(store: &Arc<Store>) -> Result<(), String> {
    let (how, master) = (ImageEnd::Deleted, "another server");
    match image_steps::add_tombstone(store, &name("base/2"), None, how, master) {
        Ok(()) | Err(StoreError::Gone { .. }) => {}
        Err(error) => return Err(error_chain(&error)),
    }
    match store.images.expect_new(&name("base/2")) {
        Err(StoreError::Gone { .. }) => Ok(()),
        Ok(()) => Err("the name can be used".to_owned()),
        Err(error) => Err(error_chain(&error)),
    }
}

fn renote(store: &Arc<Store>) -> Result<(), String> {
    let tags = [("tested".to_owned(), "yes".to_owned())].into();
    let notes = Notes { tags, ..Notes::default() };
    let image = Image { content: content_of("base/1"), notes };
    let changed = image_steps::update_notes(store, &image).map_err(|error| error_chain(&error))?;
    assert!(changed);
    let notes = store.images.get(&name("base/1")).map_err(|error| error_chain(&error))?.image.notes;
    assert_eq!(notes, image.notes);
    Ok(())
}

fn drop_copy(store: &Arc<Store>) -> Result<(), String> {
    match store.images.drop_copy(&name("base/2")) {
        Ok(()) | Err(StoreError::NotFound { .. }) => Ok(()),
        Err(error) => Err(error_chain(&error)),
    }
}

fn collect(store: &Arc<Store>) -> Result<(), String> {
    let never = Bounds { above_percent: 100, down_to_percent: 100 };
    let all = CollectRequest { dry_run: false, bytes: 0 };
    let collected = Collector::new(Arc::clone(store), never).collect(all, || false);
    collected.map(drop).map_err(|error| error_chain(&error))
}

fn group(text: &str) -> Owners {
    Owners::new([text], [])
}

fn now() -> Time {
    Time { seconds: 1_700_000_000, nanoseconds: 0 }
}

/// Makes a directory that is told as `names` does.
fn prepare_directory(store: &Store, told: &str) {
    let (directory, owners) = told.split_once(": ").unwrap();
    let owners = owners.strip_prefix("group ").map(group).unwrap_or_default();
    let directory = name(directory);
    let made = store.directories.change(|directories| {
        let names = directories.to_make(&directory, false, |_| true)?;
        Ok(directories.make(&directory, names, Some(owners), now())?)
    });
    made.unwrap();
}

fn changed<T>(done: Result<T, DirectoriesChangeError>) -> Result<(), String> {
    done.map(drop).map_err(|error| error_chain(&error))
}

fn make_directory(store: &Arc<Store>) -> Result<(), String> {
    changed(store.directories.change(|directories| {
        for (text, owner) in [("web", "infra"), ("web/prod", "web")] {
            let names = directories.to_make(&name(text), true, |_| false)?;
            directories.make(&name(text), names, Some(group(owner)), now())?;
        }
        Ok(())
    }))
}

fn change_owner(store: &Arc<Store>) -> Result<(), String> {
    changed(
        store.directories.change(|directories| {
            Ok(directories.give(&name("base"), group("web"), now(), |_| false)?)
        }),
    )
}

fn change_readers(store: &Arc<Store>) -> Result<(), String> {
    let (add, remove) = (["db1".to_owned()].into(), [].into());
    changed(store.directories.change(|directories| {
        Ok(directories.change_readers(&name("base"), (add, &remove), now(), |_| false)?)
    }))
}

fn remove_directory(store: &Arc<Store>) -> Result<(), String> {
    let removed = store.directories.change(|directories| {
        Ok(directories.remove(&name("web"), store.images.count_below(&name("web")))?)
    });
    match removed {
        Err(DirectoriesChangeError::Directory(DirectoryError::NotFound { .. })) => Ok(()),
        other => changed(other),
    }
}

fn take_directories(store: &Arc<Store>) -> Result<(), String> {
    let own = store.directories.now().version().expect("some were made before");
    let version = DirectoriesVersion { changes: 9, id: 9, ..own };
    let made = |(text, owners)| (name(text), Made { owners, made_on: now(), ..Made::default() });
    let theirs = [("base", group("web")), ("lib", Owners::default())].map(made).into();
    let theirs = Directories::with_version(version, theirs);
    // False if it was done before.
    changed(store.directories.replace_all(theirs, |own| own.version() != Some(version)))
}

/// The tree of an image: a file that all have, a small one, a large one, and a second name.
fn tree_of(image: &str) -> (Tree, Vec<Vec<u8>>) {
    let small = format!("this is {image}\n").into_bytes();
    let large: Vec<u8> = small.iter().copied().cycle().take(300_000).collect();
    let contents = vec![b"shared".to_vec(), small, large];
    let mut builder = TreeBuilder::new(ALGORITHM);
    for path in ["/etc", "/usr", "/usr/lib"] {
        builder.insert(path.parse().unwrap(), Node::Directory(Metadata::new(0o755, 0, 0))).unwrap();
    }
    for (path, content) in ["/etc/shared", "/etc/release", "/usr/lib/large"].iter().zip(&contents) {
        let file = File {
            metadata: Metadata::new(0o644, 0, 0),
            mtime: Time { seconds: 1_600_000_000, nanoseconds: 0 },
            size_bytes: content.len() as u64,
            object: ALGORITHM.digest(content).into(),
        };
        builder.insert(path.parse().unwrap(), Node::Leaf(Leaf::File(file))).unwrap();
    }
    (builder.finish().unwrap(), contents)
}

fn encodings(directory: &Directory, into: &mut Vec<Vec<u8>>) {
    into.push(directory.encode());
    for entry in directory.entries() {
        if let Child::Directory(below) = &entry.child {
            encodings(below, into);
        }
    }
}

/// What can be signed of an image.
fn content_of(image: &str) -> Content {
    let (tree, _) = tree_of(image);
    Content {
        format: FORMAT,
        name: name(image),
        root: tree.digest(),
        filter: Some(Filter::new::<&str>([]).unwrap()),
        triggers: Triggers::default(),
        computed: computed_rules(&tree),
        health_check: None,
        signers: Vec::new(),
    }
}

/// Stores what is missing of an image.
fn upload(store: &Store, image: &str) -> Result<Image, String> {
    let failed = |error: StoreError| error_chain(&error);
    let (tree, mut objects) = tree_of(image);
    encodings(tree.root(), &mut objects);
    for content in objects {
        let (id, size_bytes) = (ALGORITHM.digest(&content), content.len() as u64);
        if store.objects.held(&id).map_err(failed)? == Some(size_bytes) {
            continue;
        }
        let mut receiving = store.objects.receive(id, size_bytes).map_err(failed)?;
        for chunk in content.chunks(200_000) {
            receiving.write(chunk).map_err(failed)?;
        }
        receiving.finish().and_then(PendingStore::wait).map_err(failed)?;
    }
    Ok(Image { content: content_of(image), notes: Notes::default() })
}

/// Uploads what is missing and adds the image, in the order in which the service does.
fn store_image(store: &Store, image: &str) -> Result<(), String> {
    let image = upload(store, image)?;
    let checked = check_tree(&*store.objects, &image.content)
        .map_err(|error: AdmissionError| error_chain(&error))?;
    store.objects.sync().map_err(|error| error_chain(&error))?;
    let record = Record { image, totals: checked.totals };
    match store.images.add(&record) {
        // It was there already.
        Ok(()) | Err(StoreError::Exists { .. }) => Ok(()),
        Err(error) => Err(error_chain(&error)),
    }
}

fn name(text: &str) -> ImageName {
    ImageName::new(text).unwrap()
}

/// The names of the images that are seen, and the directories that were made, with their owners.
pub fn names(store: &Store) -> Vec<String> {
    let mut names = images(store);
    if let Some(why) = store.directories.damage() {
        names.push(format!("damaged directories: {why}"));
    }
    let all = Sums::default();
    let directories = store.directories.now();
    let (listed, _) = directories.list(|_| true, &all, (None, None), 100);
    let made = listed.into_iter().filter(|directory| directory.made_on.is_some());
    let readers = directories.readers();
    names.extend(made.map(|one| {
        let machines: Vec<&String> = readers.get(&one.name).into_iter().flatten().collect();
        let read = machines.iter().map(|machine| format!(", read by {machine}"));
        format!("directory {}: {}{}", one.name, one.owners.in_words(), read.collect::<String>())
    }));
    names
}

fn images(store: &Store) -> Vec<String> {
    let page = store.images.list(None, 100);
    page.images.into_iter().map(|image| image.name.to_string()).collect()
}

/// Reads every image with all that it needs.
///
/// # Errors
///
/// What is missing or wrong.
pub fn expect_whole(store: &Store) -> Result<(), String> {
    let damaged = store.images.damaged();
    if !damaged.is_empty() {
        return Err(format!("damaged records: {damaged:?}"));
    }
    for image in images(store) {
        let record = store.images.get(&name(&image)).map_err(|error| error_chain(&error))?;
        let content = record.image.content;
        let totals =
            check_tree(&*store.objects, &content).map_err(|error| error_chain(&error))?.totals;
        if totals != record.totals {
            return Err(format!("{image} has {totals:?}"));
        }
        let (tree, contents) = tree_of(&image);
        if tree.digest() != content.root {
            return Err(format!("{image} is another one"));
        }
        for content in contents {
            expect_object(store, &ALGORITHM.digest(&content))?;
        }
    }
    Ok(())
}

fn expect_object(store: &Store, id: &ObjectId) -> Result<(), String> {
    match store.objects.open_verified(id) {
        Ok(Some(_)) => Ok(()),
        Ok(None) => Err(format!("object {id} is missing or corrupt")),
        Err(error) => Err(error_chain(&error)),
    }
}
