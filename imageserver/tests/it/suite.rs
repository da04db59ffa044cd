//! What every kind of store does alike: one suite, run on each.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Barrier};

use api::image_server::collection::{CollectReply, CollectRequest};
use imageserver::core::collection::disk_pressure::Bounds;
use imageserver::store::image_trees::check_tree;
use imageserver::store::medium_reader::MediumReader;
use imageserver::store::medium_reader::OnMedium;
use imageserver::store::record::Record;
use imageserver::store::{
    Store,
    error::{Ending, StoreError},
    layout,
};
use imageserver::{collection::Collector, store::error::CollectError};
use model::image::{Image, ImageName, Notes};
use model::object::{Algorithm, ObjectId};
use model::tree::{Time, Tree};

use crate::fixture::{ALGORITHM, directories, flip, image_of, name, stored, tree_of};

/// A place where a store may lie.
pub trait Place {
    /// Opens the store as a server does that starts: none has it open.
    fn open(&self) -> Arc<Store>;

    /// Changes a byte of an object behind the back of the server.
    fn spoil(&self, id: &ObjectId);

    /// Puts something else in the place of the record of an image.
    fn spoil_record(&self, image: &str);

    /// True if files are shorter than the objects in them that gain by it.
    fn is_packing(&self) -> bool {
        false
    }
}

/// A directory of a disk, where objects are packed at that level.
struct Local(tempfile::TempDir, i32);

impl Local {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap(), 0)
    }

    fn packing() -> Self {
        Self(tempfile::tempdir().unwrap(), 3)
    }

    fn stored(&self, id: &ObjectId) -> PathBuf {
        stored(self.0.path(), id)
    }
}

impl Place for Local {
    fn open(&self) -> Arc<Store> {
        Arc::new(Store::open_packing(self.0.path(), self.1).unwrap())
    }

    fn spoil(&self, id: &ObjectId) {
        flip(&self.stored(id));
    }

    fn spoil_record(&self, image: &str) {
        let path = layout::image_path(&name(image));
        std::fs::write(self.0.path().join("images").join(path), "no record\n").unwrap();
    }

    fn is_packing(&self) -> bool {
        self.1 > 0
    }
}

macro_rules! run_on_each {
    ($($behaviour:ident)*) => {
        mod local {
            $(#[test] fn $behaviour() { super::$behaviour(&super::Local::new()); })*
        }
        mod packing {
            $(#[test] fn $behaviour() { super::$behaviour(&super::Local::packing()); })*
        }
        mod bucket {
            $(#[test] fn $behaviour() { super::$behaviour(&crate::bucket::Bucket::new()); })*
        }
    };
}

run_on_each! {
    objects_come_back_and_outlast_the_server
    what_is_not_what_was_announced_leaves_nothing
    objects_come_from_many_at_once
    corrupt_objects_are_put_aside_and_come_again
    reading_all_finds_what_is_corrupt
    names_are_used_once
    one_of_many_has_a_name
    notes_are_changed_or_left
    images_expire_when_they_are_due
    uses_of_images_are_known
    what_nothing_needs_is_collected
    a_damaged_record_stops_collections
    directories_outlast_the_server
}

fn put_with(store: &Store, algorithm: Algorithm, content: &[u8]) -> ObjectId {
    let id = algorithm.digest(content);
    let mut receiving = store.objects.receive(id, content.len() as u64).unwrap();
    for chunk in content.chunks(100_000) {
        receiving.write(chunk).unwrap();
    }
    receiving.finish().unwrap().wait().unwrap();
    id
}

fn put(store: &Store, content: &[u8]) -> ObjectId {
    put_with(store, ALGORITHM, content)
}

fn read(store: &Store, id: &ObjectId) -> Option<Vec<u8>> {
    let content = store.objects.open_verified(id).unwrap()?;
    let size_bytes = content.size_bytes();
    let bytes = content.into_bytes().unwrap();
    assert_eq!(bytes.len() as u64, size_bytes);
    Some(bytes.into())
}

/// Contents of all lengths that are treated in a way of their own.
fn contents() -> Vec<Vec<u8>> {
    [0, 1, 1_000, 64 << 10, (64 << 10) + 1, 300_000, 11 << 20]
        .map(|length| (0..length).map(|at: u32| (at % 251) as u8).collect())
        .to_vec()
}

fn objects_come_back_and_outlast_the_server(place: &dyn Place) {
    let contents = contents();
    let store = place.open();
    let stranger = ALGORITHM.digest(b"never stored");
    let mut ids = Vec::new();
    for algorithm in [Algorithm::Blake3, Algorithm::Sha512] {
        ids.extend(contents.iter().map(|content| put_with(&store, algorithm, content)));
    }
    store.objects.sync().unwrap();
    let twice: Vec<&Vec<u8>> = contents.iter().chain(&contents).collect();
    let expect = |store: &Store| {
        for (id, content) in ids.iter().zip(&twice) {
            assert_eq!(read(store, id).as_ref(), Some(*content), "{id}");
            let length = Some(content.len() as u64);
            assert_eq!(store.objects.size_bytes(id).unwrap(), length);
            assert_eq!(store.objects.held(id).unwrap(), length);
        }
        assert_eq!(read(store, &stranger), None);
        assert_eq!(store.objects.held(&stranger).unwrap(), None);
        let asked = [ids[0], stranger, ids[1], ids[13]];
        assert_eq!(store.objects.missing(&asked).unwrap(), [stranger]);
    };
    expect(&store);
    drop(store);
    let store = place.open();
    expect(&store);
    store.objects.count(&|| false);
    let bytes: u64 = twice.iter().map(|content| content.len() as u64).sum();
    let held = store.objects.object_counts();
    assert_eq!((held.objects, held.complete), (14, true));
    match place.is_packing() {
        true => assert!(held.bytes < bytes / 10, "{} of {bytes}", held.bytes),
        false => assert_eq!(held.bytes, bytes),
    }
}

fn what_is_not_what_was_announced_leaves_nothing(place: &dyn Place) {
    let store = place.open();
    for length in [5, 500_000, 9 << 20] {
        let (announced, sent) = (vec![1; length], vec![2; length]);
        let id = ALGORITHM.digest(&announced);
        let mut receiving = store.objects.receive(id, length as u64).unwrap();
        receiving.write(&sent).unwrap();
        let error = receiving.finish().err().unwrap();
        let got = ALGORITHM.digest(&sent);
        let is_named = matches!(error, StoreError::Content { want, got: found }
            if (want, found) == (id, got));
        assert!(is_named, "{error}");
        let mut receiving = store.objects.receive(id, length as u64).unwrap();
        receiving.write(&announced).unwrap();
        drop(receiving);
        assert_eq!(store.objects.missing(&[id, got]).unwrap(), [id, got]);
    }
}

fn objects_come_from_many_at_once(place: &dyn Place) {
    let store = place.open();
    let content = |number: u32| format!("object {number}").into_bytes();
    std::thread::scope(|scope| {
        for from in 0..4 {
            let store = &store;
            // Each of them comes twice.
            scope.spawn(move || {
                for number in from * 20..from * 20 + 40 {
                    put(store, &content(number % 80));
                }
            });
        }
    });
    let ids: Vec<ObjectId> = (0..80).map(|number| ALGORITHM.digest(&content(number))).collect();
    assert_eq!(store.objects.missing(&ids).unwrap(), []);
    assert_eq!(read(&store, &ids[79]), Some(content(79)));
}

fn corrupt_objects_are_put_aside_and_come_again(place: &dyn Place) {
    let contents = [b"small".to_vec(), vec![7; 300_000]];
    for content in contents {
        let store = place.open();
        let id = put(&store, &content);
        store.objects.sync().unwrap();
        drop(store);
        place.spoil(&id);
        let store = place.open();
        assert_eq!(read(&store, &id), None);
        assert_eq!(store.objects.corrupt(), 1);
        assert_eq!(store.objects.missing(&[id]).unwrap(), [id]);
        assert_eq!(
            store.objects.damaged_objects().damage(&id).map(|damage| damage.name()),
            Some("corrupt")
        );
        put(&store, &content);
        assert_eq!(read(&store, &id), Some(content));
        assert_eq!(store.objects.damaged_objects().count(), 0);
    }
}

fn reading_all_finds_what_is_corrupt(place: &dyn Place) {
    let store = place.open();
    let good = put(&store, b"good");
    let bad = put(&store, b"bad");
    store.objects.sync().unwrap();
    place.spoil(&bad);
    let mut reader = MediumReader::default();
    let mut seen = BTreeSet::new();
    let mut told = 0;
    for below in layout::object_directories() {
        for id in store.objects.list(&below).unwrap() {
            let mut pace = |bytes| {
                told += bytes;
                true
            };
            let read = store.objects.read_medium(&id, &mut reader, &mut pace).unwrap();
            let expected = if id == good { OnMedium::Whole(4) } else { OnMedium::Corrupt };
            assert_eq!(read, expected);
            seen.insert(id);
        }
    }
    assert_eq!((seen, told), ([good, bad].into(), 7));
    assert_eq!(
        store.objects.read_medium(&bad, &mut reader, &mut |_| true).unwrap(),
        OnMedium::Absent
    );
    assert_eq!(store.objects.missing(&[good, bad]).unwrap(), [bad]);
}

/// An image of which all is there.
fn add(store: &Store, image: &str, content: &[u8], notes: Notes) -> Result<Tree, StoreError> {
    let tree = tree_of(&[("/etc/file", content)]);
    put(store, content);
    for (_, encoding) in directories(&tree) {
        put(store, &encoding);
    }
    let content = image_of(image, &tree);
    let checked = check_tree(&*store.objects, &content).unwrap();
    let totals = checked.totals;
    store.objects.sync().unwrap();
    store.images.add(&Record { image: Image { content, notes }, totals }).map(|()| tree)
}

fn names(store: &Store) -> Vec<String> {
    let page = store.images.list(None, 100);
    page.images.into_iter().map(|image| image.name.to_string()).collect()
}

fn ending<T>(result: Result<T, StoreError>) -> &'static str {
    match result {
        Ok(_) => "is there",
        Err(StoreError::NotFound { .. }) => "never was",
        Err(StoreError::Exists { .. }) => "exists",
        Err(StoreError::Gone { ending: Ending::Deleted, .. }) => "was deleted",
        Err(StoreError::Gone { ending: Ending::Expired, .. }) => "has expired",
        Err(error) => panic!("{error}"),
    }
}

fn names_are_used_once(place: &dyn Place) {
    let store = place.open();
    let all = ["a", "a/b", "a.image/b", "gr\u{fc}n/%2f x"];
    let trees: Vec<Tree> =
        all.iter().map(|image| add(&store, image, b"x", Notes::default()).unwrap()).collect();
    assert_eq!(ending(add(&store, "a", b"y", Notes::default())), "exists");
    assert_eq!(ending(store.images.get(&name("b"))), "never was");
    assert_eq!(ending(store.images.delete(&name("b"), "deleted\n")), "never was");
    store.images.delete(&name("a"), "deleted by a test\n").unwrap();
    let expect = |store: &Store| {
        assert_eq!(names(store), ["a.image/b", "a/b", "gr\u{fc}n/%2f x"]);
        assert_eq!(ending(store.images.get(&name("a"))), "was deleted");
        assert_eq!(ending(store.images.delete(&name("a"), "deleted\n")), "was deleted");
        assert_eq!(ending(store.images.expect_new(&name("a"))), "was deleted");
        assert_eq!(ending(add(store, "a", b"y", Notes::default())), "was deleted");
        assert_eq!(ending(store.images.expect_new(&name("a/b"))), "exists");
        let record = store.images.get(&name("gr\u{fc}n/%2f x")).unwrap();
        assert_eq!(record.image.content.root, trees[3].digest());
        let page = store.images.list(Some(&name("a/b")), 1);
        assert_eq!((page.images.len(), page.more), (1, false));
    };
    expect(&store);
    drop(store);
    expect(&place.open());
}

fn one_of_many_has_a_name(place: &dyn Place) {
    let store = place.open();
    let barrier = Barrier::new(8);
    let ends: Vec<(u32, &str)> = std::thread::scope(|scope| {
        let adders: Vec<_> = (0..8_u32)
            .map(|number| {
                let (store, barrier) = (&store, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    let content = number.to_string();
                    (number, ending(add(store, "taken", content.as_bytes(), Notes::default())))
                })
            })
            .collect();
        adders.into_iter().map(|adder| adder.join().unwrap()).collect()
    });
    let winners: Vec<u32> =
        ends.iter().filter(|(_, end)| *end == "is there").map(|(number, _)| *number).collect();
    assert_eq!(winners.len(), 1, "{ends:?}");
    assert!(ends.iter().all(|(_, end)| ["is there", "exists"].contains(end)), "{ends:?}");
    let tree = tree_of(&[("/etc/file", winners[0].to_string().as_bytes())]);
    assert_eq!(store.images.get(&name("taken")).unwrap().image.content.root, tree.digest());
    assert_eq!((store.images.count(), store.images.additions()), (1, 1));
}

fn tag(text: &str) -> model::image::tags::Tags {
    [(text.to_owned(), String::new())].into()
}

fn notes_are_changed_or_left(place: &dyn Place) {
    let store = place.open();
    add(&store, "base", b"x", Notes::default()).unwrap();
    let base = name("base");
    let changed = store.images.change::<StoreError>(&base, |notes| {
        notes.tags = tag("tested");
        Ok(())
    });
    assert_eq!(changed.unwrap().tags, tag("tested"));
    let refused = store.images.change::<StoreError>(&base, |notes| {
        notes.tags = tag("wrong");
        Err(StoreError::NotFound { name: name("other") })
    });
    refused.unwrap_err();
    let unknown = store.images.change::<StoreError>(&name("unknown"), |_| Ok(()));
    assert_eq!(ending(unknown), "never was");
    drop(store);
    let store = place.open();
    assert_eq!(store.images.get(&base).unwrap().image.notes.tags, tag("tested"));
    assert_eq!(store.images.list(None, 1).images[0].tags, tag("tested"));
}

fn images_expire_when_they_are_due(place: &dyn Place) {
    let store = place.open();
    let at = Time { seconds: 1_000, nanoseconds: 0 };
    add(&store, "soon", b"x", Notes { expires_at: Some(at), ..Notes::default() }).unwrap();
    add(&store, "never", b"x", Notes::default()).unwrap();
    let soon = name("soon");
    assert_eq!(store.images.expiring(), [(soon.clone(), at)]);
    let is_due = |now: i64| move |at: Option<Time>| at.is_some_and(|at| at.seconds <= now);
    let expire = |now| store.images.expire(&soon, "expired\n", is_due(now)).unwrap();
    assert!(!expire(999));
    assert!(expire(1_000));
    assert!(!expire(1_000), "it is gone already");
    assert!(!store.images.expire(&name("never"), "expired\n", is_due(i64::MAX)).unwrap());
    drop(store);
    let store = place.open();
    assert_eq!(ending(store.images.get(&soon)), "has expired");
    assert_eq!(names(&store), ["never"]);
}

fn uses_of_images_are_known(place: &dyn Place) {
    let store = place.open();
    let uses =
        |texts: &[&str]| -> BTreeSet<ImageName> { texts.iter().map(|text| name(text)).collect() };
    store.holding.note("one", uses(&["a", "b"]), 600).unwrap();
    store.holding.note("two", uses(&["b"]), 600).unwrap();
    let who = |store: &Store, image: &str| -> Vec<String> {
        let holders = store.holding.holders(&name(image)).unwrap();
        holders.into_iter().map(|holder| holder.name).collect()
    };
    assert_eq!(who(&store, "b"), ["one", "two"]);
    store.holding.note("one", uses(&["a"]), 600).unwrap();
    let expect = |store: &Store| {
        assert_eq!(
            (who(store, "a"), who(store, "b")),
            (vec!["one".to_owned()], vec!["two".to_owned()])
        );
        assert_eq!(who(store, "c"), [""; 0]);
        assert_eq!(store.holding.count(), 2);
    };
    expect(&store);
    drop(store);
    expect(&place.open());
}

/// Makes a directory without owners.
pub fn make_directory(store: &Store, directory: &str) {
    let made = store.directories.change(|directories| {
        let names = vec![name(directory)];
        Ok(directories.make(&name(directory), names, None, Time::default())?)
    });
    made.unwrap();
}

fn directories_outlast_the_server(place: &dyn Place) {
    let store = place.open();
    make_directory(&store, "web");
    make_directory(&store, "web/edge");
    let refused = store.directories.change(|directories| {
        directories.remove(&name("web/edge"), 0)?;
        Ok(directories.remove(&name("web"), 1)?)
    });
    refused.unwrap_err();
    let expected = store.directories.now();
    drop(store);
    let store = place.open();
    assert_eq!((store.directories.damage(), store.directories.now()), (None, expected));
}

fn collect(store: &Arc<Store>) -> Result<CollectReply, CollectError> {
    let never = Bounds { above_percent: 100, down_to_percent: 100 };
    let collector = Collector::new(Arc::clone(store), never);
    collector.collect(CollectRequest { dry_run: false, bytes: 0 }, || false)
}

fn what_nothing_needs_is_collected(place: &dyn Place) {
    let store = place.open();
    let kept = add(&store, "kept", b"kept", Notes::default()).unwrap();
    let former = add(&store, "former", b"former", Notes::default()).unwrap();
    store.images.delete(&name("former"), "deleted\n").unwrap();
    let [leased, garbage] = [&b"leased"[..], b"garbage"].map(|content| put(&store, content));
    store.leasing.give(&[leased], 3_600).unwrap();
    assert_eq!(store.leasing.count(), 1);
    let ids = |tree: &Tree| directories(tree).into_iter().map(|(id, _)| id).collect::<Vec<_>>();
    // What the one image needs, and the other does not, beside the contents of the files.
    let free: Vec<ObjectId> =
        ids(&former).into_iter().chain([ALGORITHM.digest(b"former")]).collect();
    let reply = collect(&store).unwrap();
    assert_eq!((reply.images, reply.removed.objects), (1, free.len() as u64 + 1));
    assert_eq!((reply.unneeded.objects, reply.leased.objects), (free.len() as u64 + 2, 1));
    let mut gone = free.clone();
    gone.push(garbage);
    assert_eq!(store.objects.missing(&gone).unwrap(), gone);
    let needed: Vec<ObjectId> =
        ids(&kept).into_iter().chain([ALGORITHM.digest(b"kept"), leased]).collect();
    assert_eq!(store.objects.missing(&needed).unwrap(), []);
    assert_eq!(collect(&store).unwrap().removed.objects, 0);
    // What was removed can come again.
    add(&store, "again", b"former", Notes::default()).unwrap();
    assert_eq!(store.objects.missing(&free).unwrap(), []);
    assert_eq!(read(&store, &ALGORITHM.digest(b"former")), Some(b"former".to_vec()));
    assert_eq!(collect(&store).unwrap().removed.objects, 0);
}

fn a_damaged_record_stops_collections(place: &dyn Place) {
    let store = place.open();
    add(&store, "good", b"x", Notes::default()).unwrap();
    add(&store, "bad", b"x", Notes::default()).unwrap();
    let garbage = put(&store, b"garbage");
    drop(store);
    place.spoil_record("bad");
    let store = place.open();
    let damaged: Vec<ImageName> =
        store.images.damaged().into_iter().map(|(name, _)| name).collect();
    assert_eq!(damaged, [name("bad")]);
    assert_eq!(names(&store), ["good"]);
    let got = store.images.get(&name("bad"));
    assert!(matches!(got, Err(StoreError::Damaged { .. })), "{got:?}");
    let error = collect(&store).unwrap_err();
    assert!(matches!(&error, CollectError::Damaged { image } if *image == name("bad")), "{error}");
    assert_eq!(store.objects.missing(&[garbage]).unwrap(), []);
    store.images.delete(&name("bad"), "deleted\n").unwrap();
    assert_eq!(store.images.damaged(), []);
    assert_eq!(ending(store.images.get(&name("bad"))), "was deleted");
}
