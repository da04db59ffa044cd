//! Fetches from sources that break off, stall, lie and refuse; from the machine itself; and onto
//! disks that fill up; and objects that a caller sends.

mod added;
mod host;
mod limits;
mod reuse;

use api::fault::FaultCode;
use api::subd::{
    Activity, CacheReport, Commit, CommitRequest, Complaint, Fetch, FetchFailure, FetchObject,
    FetchRequest, LastFetch, PollReply, UpdateOutcome,
};
use model::object::{Algorithm, ObjectId};
use nix::mount::{MsFlags, mount, umount};

use crate::fixture::{Edit, Source, Sub};
use host::{Break, Host, Line, Vice, content};

const MIB: usize = 1 << 20;

fn object(content: &[u8]) -> FetchObject {
    FetchObject { id: Algorithm::Blake3.digest(content), size_bytes: content.len() as u64 }
}

async fn begin(sub: &Sub, id: u64, sources: &[&str], objects: &[FetchObject]) {
    let sources = sources.iter().map(|source| (*source).to_owned()).collect();
    let request = FetchRequest { fetch_id: id, sources, objects: objects.into(), ahead: false };
    sub.client.call::<Fetch>(&request).await.unwrap();
}

async fn ended(sub: &Sub, id: u64) -> LastFetch {
    let ended = |last: &LastFetch| last.fetch_id == id;
    let reply = sub.poll_until(|reply| reply.last_fetch.as_ref().is_some_and(ended)).await;
    reply.last_fetch.unwrap()
}

async fn fetch(sub: &Sub, id: u64, sources: &[&str], objects: &[FetchObject]) -> LastFetch {
    begin(sub, id, sources, objects).await;
    ended(sub, id).await
}

/// The objects of the cache; each is what its name says.
async fn cached(sub: &Sub) -> Vec<ObjectId> {
    let Some(CacheReport::Full(ids)) = sub.poll().await.cache else { panic!() };
    for id in &ids {
        let content = std::fs::read(sub.at(&format!("/.subd/objects/{id}"))).unwrap();
        assert_eq!(id.algorithm().digest(&content), *id);
    }
    ids
}

/// The names of files that are not complete.
fn partials(sub: &Sub) -> Vec<String> {
    let entries = std::fs::read_dir(sub.at("/.subd/objects")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| !name.starts_with("blake3:")).collect()
}

fn unrequested(id: ObjectId) -> String {
    format!("object {id} was not requested, or was sent before")
}

fn lie(source: &str, text: String) -> Complaint {
    Complaint { source: source.to_owned(), lies: true, text }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_connection_costs_hardly_a_byte_twice() {
    let (sub, host) = (Sub::start().await, Host::start(Vice::None).await);
    let large = content(1, 12 * MIB);
    let objects = [object(b"small"), object(&large)];
    host.add(&large);
    host.add(b"small");
    let cut = Break::Cut(4 * MIB as u64);
    let line = Line::start(&host.address, &[cut, cut], false).await;
    let last = fetch(&sub, 1, &[&line.address], &objects).await;
    assert_eq!((last.error, last.objects, last.complaints), (None, 2, Vec::new()));
    assert_eq!(last.bytes, large.len() as u64 + 5);
    let passed = line.passed_bytes();
    assert!(passed < 12 * MIB as u64 + (512 << 10), "{passed}");
    let asked = host.asked();
    assert_eq!((asked.len(), &*asked[0]), (3, "batch of 2"), "{asked:?}");
    assert!(asked[1].starts_with("from 4") && asked[2].starts_with("from 8"), "{asked:?}");
    assert_eq!(cached(&sub).await.len(), 2);
    assert_eq!(partials(&sub), [""; 0]);
    line.stop().await;
    host.stop().await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_source_and_another_run_go_on_where_one_ended() {
    let (sub, host) = (Sub::start().await, Host::start(Vice::None).await);
    let large = content(1, 6 * MIB);
    let one = [object(&large)];
    host.add(&large);
    let cut = [Break::Cut(2 * MIB as u64)];
    let first = Line::start(&host.address, &cut, true).await;
    let last = fetch(&sub, 1, &[&first.address], &one).await;
    let Some(FetchFailure::Sources(why)) = last.error else { panic!("{last:?}") };
    assert!(why.contains("cannot connect"), "{why}");
    assert!((1..=2 * MIB as u64).contains(&last.bytes), "{}", last.bytes);
    assert_eq!(partials(&sub), [format!("partial.{}", one[0].id)]);
    // What has come outlasts subd.
    let root = sub.root.clone();
    let place = sub.stop().await.unwrap();
    let sub = Sub::start_on(&root, &[]).await.owning(place);
    let second = Line::start(&host.address, &cut, true).await;
    let last = fetch(&sub, 2, &[&second.address, &host.address], &one).await;
    assert_eq!((last.error, last.objects), (None, 1));
    let complaint = &last.complaints[0];
    assert_eq!((&complaint.source, complaint.lies), (&second.address, false));
    let asked = host.asked();
    assert_eq!((asked.len(), &*asked[0]), (3, "batch of 1"));
    assert!(asked[1].starts_with("from 1") || asked[1].starts_with("from 2"), "{asked:?}");
    assert!(asked[2].starts_with("from 3") || asked[2].starts_with("from 4"), "{asked:?}");
    assert_eq!(cached(&sub).await, [one[0].id]);
    // What nobody wants any more goes.
    let third = Line::start(&host.address, &cut, true).await;
    let other = content(2, 6 * MIB);
    host.add(&other);
    fetch(&sub, 3, &[&third.address], &[object(&other)]).await;
    assert_eq!(partials(&sub).len(), 1);
    assert_eq!(fetch(&sub, 4, &[&host.address], &one).await.error, None);
    assert_eq!(partials(&sub), [""; 0]);
    host.stop().await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_liar_is_named_even_if_another_source_has_everything() {
    let sub = Sub::start().await;
    let (liar, good) = (Host::start(Vice::None).await, Host::start(Vice::None).await);
    let objects = [object(b"right"), object(b"other")];
    let other = good.add(b"other");
    good.add(b"right");
    liar.lie(objects[0].id, b"wrong");
    let sources = [&*liar.address, &good.address, &liar.address];
    let last = fetch(&sub, 1, &sources, &objects).await;
    assert_eq!((last.error, last.objects, last.bytes), (None, 2, 10));
    let wrong = Algorithm::Blake3.digest(b"wrong");
    let text = format!("5 bytes that hash to {wrong} came for object {} of 5 bytes", objects[0].id);
    assert_eq!(last.complaints, [lie(&liar.address, text)]);
    let (_, html) = sub.client.get("/").await.unwrap();
    let html = String::from_utf8(html.to_vec()).unwrap();
    assert!(html.contains(&format!("{} lies", liar.address)), "{html}");
    // It is not asked for what is missing still.
    liar.asked();
    let third = object(b"third");
    let last = fetch(&sub, 2, &sources, &[object(b"right"), third]).await;
    assert!(last.error.is_some() && last.complaints.is_empty(), "{last:?}");
    assert_eq!(liar.asked().len(), 2);
    liar.lie(third.id, b"THIRD");
    let last = fetch(&sub, 3, &sources, &[third]).await;
    assert!(last.error.is_some(), "{last:?}");
    assert_eq!((liar.asked().len(), last.complaints.len()), (1, 1));
    assert_eq!(cached(&sub).await, {
        let mut both = [objects[0].id, other];
        both.sort();
        both
    });
    for host in [liar, good] {
        host.stop().await;
    }
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_sent_the_wrong_part_of_an_object_is_named() {
    let sub = Sub::start().await;
    let (liar, good) = (Host::start(Vice::None).await, Host::start(Vice::None).await);
    let right = content(1, 4 * MIB);
    let mut wrong = right.clone();
    wrong[1_000] ^= 1;
    let one = [object(&right)];
    good.add(&right);
    liar.lie(one[0].id, &wrong);
    let line = Line::start(&liar.address, &[Break::Cut(2 * MIB as u64)], true).await;
    let last = fetch(&sub, 1, &[&line.address, &good.address], &one).await;
    assert_eq!((last.error, last.objects, last.bytes), (None, 1, 4 * MIB as u64));
    let asked = good.asked();
    assert_eq!((asked.len(), &*asked[1]), (2, "batch of 1"), "the whole once more");
    let [cut, lie] = &last.complaints[..] else { panic!("{:?}", last.complaints) };
    assert_eq!((&cut.source, cut.lies), (&line.address, false));
    assert_eq!((&lie.source, lie.lies), (&line.address, true));
    assert!(lie.text.contains("was wrong"), "{}", lie.text);
    assert_eq!(cached(&sub).await, [one[0].id]);
    // Alone it is caught by itself.
    let line = Line::start(&liar.address, &[Break::Cut(2 * MIB as u64)], false).await;
    let again = content(2, 4 * MIB);
    let two = [object(&again)];
    liar.lie(two[0].id, &wrong);
    let last = fetch(&sub, 2, &[&line.address], &two).await;
    assert!(matches!(last.error, Some(FetchFailure::Sources(_))), "{last:?}");
    assert!(last.complaints.iter().all(|complaint| complaint.lies), "{:?}", last.complaints);
    assert_eq!(partials(&sub), [""; 0]);
    line.stop().await;
    for host in [liar, good] {
        host.stop().await;
    }
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_without_ranges_serves_and_one_with_others_does_not() {
    let sub = Sub::start().await;
    let large = content(1, 4 * MIB);
    let whole = Host::start(Vice::NoRanges).await;
    whole.add(&large);
    let cut = [Break::Cut(2 * MIB as u64)];
    let line = Line::start(&whole.address, &cut, false).await;
    let last = fetch(&sub, 1, &[&line.address], &[object(&large)]).await;
    assert_eq!((last.error, last.objects, last.bytes), (None, 1, 4 * MIB as u64));
    let [complaint] = &last.complaints[..] else { panic!("{:?}", last.complaints) };
    assert!(!complaint.lies && complaint.text.ends_with("it sends all of it"), "{complaint:?}");
    line.stop().await;
    let other = content(2, 4 * MIB);
    let (shifted, good) = (Host::start(Vice::OtherRange(1)).await, Host::start(Vice::None).await);
    shifted.add(&other);
    good.add(&other);
    let line = Line::start(&shifted.address, &cut, false).await;
    let last = fetch(&sub, 2, &[&line.address, &good.address], &[object(&other)]).await;
    assert_eq!((last.error, last.objects, last.bytes), (None, 1, 4 * MIB as u64));
    let [complaint] = &last.complaints[..] else { panic!("{:?}", last.complaints) };
    assert!(complaint.lies && complaint.text.contains("it sends bytes"), "{complaint:?}");
    assert!(good.asked()[0].starts_with("from "), "what had come is not lost");
    line.stop().await;
    for host in [whole, shifted, good] {
        host.stop().await;
    }
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_sends_more_than_was_asked_for_is_cut_short_and_named() {
    let sub = Sub::start().await;
    let good = Host::start(Vice::None).await;
    let small = object(b"small");
    good.add(b"small");
    let unasked = Host::start(Vice::Unasked).await;
    unasked.add(b"small");
    let last = fetch(&sub, 1, &[&unasked.address], &[small]).await;
    assert_eq!((last.error, last.objects), (None, 1));
    let id = Algorithm::Blake3.digest(b"unasked");
    assert_eq!(last.complaints, [lie(&unasked.address, unrequested(id))]);
    let second = object(b"2");
    good.add(b"2");
    let longer = Host::start(Vice::Longer(200 * MIB as u64)).await;
    longer.add(b"2");
    let line = Line::start(&longer.address, &[], false).await;
    let last = fetch(&sub, 2, &[&line.address, &good.address], &[second]).await;
    assert_eq!((last.error, last.objects), (None, 1));
    let text = format!("it has {} bytes for object {} of 1 bytes", 200 * MIB + 1, second.id);
    assert_eq!(last.complaints, [lie(&line.address, text)]);
    assert!(line.passed_bytes() < 50 * MIB as u64, "{}", line.passed_bytes());
    line.stop().await;
    for host in [good, unasked, longer] {
        host.stop().await;
    }
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_lacks_an_object_for_ever_is_named_and_left_for_the_next() {
    let sub = Sub::start().await;
    let (endless, good) = (Host::start(Vice::AbsentForever).await, Host::start(Vice::None).await);
    let wanted = object(b"wanted");
    good.add(b"wanted");
    let last = fetch(&sub, 1, &[&endless.address, &good.address], &[wanted]).await;
    assert_eq!((last.error, last.objects), (None, 1));
    assert_eq!(last.complaints, [lie(&endless.address, unrequested(wanted.id))]);
    for host in [endless, good] {
        host.stop().await;
    }
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_falls_silent_is_left_for_the_next() {
    let place = tempfile::tempdir().unwrap();
    let sub = Sub::start_on(place.path(), &["--source-timeout", "1"]).await;
    let host = Host::start(Vice::None).await;
    let large = content(1, 4 * MIB);
    host.add(&large);
    let stall = Break::Stall(2 * MIB as u64);
    let line = Line::start(&host.address, &[stall], true).await;
    let last = fetch(&sub, 1, &[&line.address, &host.address], &[object(&large)]).await;
    assert_eq!((last.error, last.objects, last.bytes), (None, 1, 4 * MIB as u64));
    let asked = host.asked();
    assert_eq!(asked.len(), 2);
    assert!(asked[1].starts_with("from 1") || asked[1].starts_with("from 2"), "{asked:?}");
    host.stop().await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_fetched_ahead_of_need_gives_way_to_what_is_needed() {
    let (sub, host) = (Sub::start().await, Host::start(Vice::None).await);
    let large = content(1, 4 * MIB);
    host.add(&large);
    host.add(b"needed");
    // The source falls silent, and would be waited for for a minute.
    let stall = Break::Stall(2 * MIB as u64);
    let line = Line::start(&host.address, &[stall], true).await;
    let request = |fetch_id, objects: &[FetchObject], ahead, source: &str| {
        let (sources, objects) = (vec![source.to_owned()], objects.into());
        FetchRequest { fetch_id, sources, objects, ahead }
    };
    let ahead = request(1, &[object(&large)], true, &line.address);
    sub.client.call::<Fetch>(&ahead).await.unwrap();
    let runs = |reply: &PollReply| matches!(reply.activity, Activity::Fetching { fetch_id: 1, .. });
    testing::eventually_async("the fetch stalls", async || {
        assert!(runs(&sub.poll().await));
        line.passed_bytes() >= 2 * MIB as u64
    })
    .await;
    // It does not give way to another one of its kind.
    let second = request(2, &[object(b"needed")], true, &host.address);
    let refused = sub.client.call::<Fetch>(&second).await.unwrap_err();
    assert_eq!(refused.code(), Some(FaultCode::Busy), "{refused:?}");
    assert!(runs(&sub.poll().await));

    let held = Line::start(&host.address, &[Break::Wait(1)], false).await;
    begin(&sub, 3, &[&held.address], &[object(b"needed")]).await;
    held.waits.notified().await;
    let last = sub.poll().await.last_fetch.unwrap();
    let gave_way = (1, Some(FetchFailure::GaveWay), 0, Vec::new());
    assert_eq!((last.fetch_id, last.error, last.objects, last.complaints), gave_way);
    held.go.notify_one();
    let last = ended(&sub, 3).await;
    assert_eq!((last.error, last.objects), (None, 1));
    held.stop().await;
    // It can be asked for again, and comes.
    let again = request(4, &[object(&large)], true, &host.address);
    sub.client.call::<Fetch>(&again).await.unwrap();
    let last = ended(&sub, 4).await;
    assert_eq!((last.error, last.objects), (None, 1));
    assert_eq!(cached(&sub).await.len(), 2);
    assert_eq!(partials(&sub), [""; 0]);
    line.stop().await;
    host.stop().await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_update_does_not_wait_for_what_is_fetched_ahead_of_need() {
    let (sub, source) = (Sub::start().await, Source::start().await);
    let host = Host::start(Vice::None).await;
    let large = content(1, 4 * MIB);
    host.add(&large);
    let line = Line::start(&host.address, &[Break::Stall(MIB as u64)], true).await;
    let request = FetchRequest {
        fetch_id: 1,
        sources: vec![line.address.clone()],
        objects: [object(&large)].into(),
        ahead: true,
    };
    sub.client.call::<Fetch>(&request).await.unwrap();
    // An update whose objects are there is staged and carried out meanwhile.
    let (_, have) = sub.tree().await;
    let want = Edit::of(&have, &source).directory("/new", 0o755).done();
    let (reply, plan) = sub.plan(&want).await;
    assert!(matches!(reply.activity, Activity::Fetching { fetch_id: 1, .. }), "{reply:?}");
    sub.prepare(&crate::fixture::request(2, &reply, &want, plan)).await.unwrap();
    sub.client.call::<Commit>(&CommitRequest { update_id: 2 }).await.unwrap();
    let over = |reply: &PollReply| {
        let fetches = matches!(reply.activity, Activity::Fetching { fetch_id: 1, .. });
        fetches && reply.last_update.is_some()
    };
    assert_eq!(sub.poll_until(over).await.last_update.unwrap().outcome, UpdateOutcome::Done);
    assert!(sub.at("/new").is_dir());
    let needed = fetch(&sub, 3, &[&host.address], &[]).await;
    assert_eq!(needed.error, None);
    line.stop().await;
    host.stop().await;
    source.stop().await;
    sub.stop().await;
}

/// A small file-system of its own.
struct Disk(tempfile::TempDir);

impl Disk {
    fn tmpfs(options: &str) -> Self {
        let place = tempfile::tempdir().unwrap();
        let tmpfs = Some("tmpfs");
        mount(tmpfs, place.path(), tmpfs, MsFlags::empty(), Some(options)).unwrap();
        Self(place)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _unmounted = umount(self.0.path());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_fills_up_meanwhile_keeps_what_is_complete() {
    let disk = Disk::tmpfs("size=16m,mode=755");
    let (sub, host) = (Sub::start_on(disk.0.path(), &[]).await, Host::start(Vice::None).await);
    let (small, large) = (content(1, MIB), content(2, 8 * MIB));
    let objects = [object(&small), object(&large)];
    host.add(&small);
    host.add(&large);
    let line = Line::start(&host.address, &[Break::Wait(4 * MIB as u64)], false).await;
    begin(&sub, 1, &[&line.address], &objects).await;
    line.waits.notified().await;
    let brim = std::fs::write(sub.at("/.subd/brim"), vec![0; 16 * MIB]);
    assert_eq!(brim.unwrap_err().kind(), std::io::ErrorKind::StorageFull);
    line.go.notify_one();
    let last = ended(&sub, 1).await;
    assert!(matches!(last.error, Some(FetchFailure::InsufficientSpace { .. })), "{last:?}");
    assert_eq!(last.objects, 1);
    assert_eq!(cached(&sub).await, [objects[0].id]);
    assert_eq!(partials(&sub), [""; 0], "what is not complete takes no space that is short");
    std::fs::remove_file(sub.at("/.subd/brim")).unwrap();
    let last = fetch(&sub, 2, &[&host.address], &objects).await;
    assert_eq!((last.error, last.objects), (None, 1));
    line.stop().await;
    host.stop().await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn inodes_are_counted_before_anything_is_fetched() {
    let disk = Disk::tmpfs("size=16m,nr_inodes=300,mode=755");
    let (sub, host) = (Sub::start_on(disk.0.path(), &[]).await, Host::start(Vice::None).await);
    let many: Vec<FetchObject> = (0..100_u8)
        .map(|number| {
            host.add(&[number]);
            object(&[number])
        })
        .collect();
    let last = fetch(&sub, 1, &[&host.address], &many).await;
    assert!(matches!(last.error, Some(FetchFailure::InsufficientSpace { .. })), "{last:?}");
    assert_eq!(host.asked(), [""; 0]);
    assert_eq!(fetch(&sub, 2, &[&host.address], &many[..20]).await.error, None);
    host.stop().await;
    sub.stop().await;
}
