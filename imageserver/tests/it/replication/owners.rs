//! Directories and their owners, which replicas take from their master and never lose.

use api::access::Owners;
use api::image_server::directories::{
    ChangeOwner, ChangeOwnerRequest, ListDirectories, ListDirectoriesRequest, MakeDirectory,
    MakeDirectoryRequest, RemoveDirectory, RemoveDirectoryRequest,
};
use api::image_server::replication::directories::DirectoriesTrouble;

use super::links::Proxy;
use super::*;

async fn mkdir(server: &Server, text: &str, group: &str) -> Result<Vec<String>, Fault> {
    let owners = Some(Owners::new([group], []));
    let request = MakeDirectoryRequest { name: name(text), parents: true, owners };
    let reply = server.client.call::<MakeDirectory>(&request).await.map_err(fault)?;
    Ok(reply.made.iter().map(ToString::to_string).collect())
}

async fn rmdir(server: &Server, text: &str) -> Result<(), Fault> {
    let request = RemoveDirectoryRequest { name: name(text) };
    server.client.call::<RemoveDirectory>(&request).await.map(drop).map_err(fault)
}

async fn chown(server: &Server, text: &str, group: &str) -> Result<(), Fault> {
    let owners = Owners::new([group], []);
    let request = ChangeOwnerRequest { name: name(text), owners };
    server.client.call::<ChangeOwner>(&request).await.map(drop).map_err(fault)
}

/// Each directory that was made, with its owners.
async fn made(server: &Server) -> Vec<String> {
    let mut request = ListDirectoriesRequest::default();
    let mut made = Vec::new();
    loop {
        let reply = server.client.call::<ListDirectories>(&request).await.unwrap();
        request.after = reply.directories.last().map(|last| last.name.clone());
        let all = reply.directories.into_iter().filter(|one| one.made_on.is_some());
        made.extend(all.map(|one| format!("{} {}", one.name, one.owners.in_words())));
        if !reply.more {
            return made;
        }
    }
}

async fn until_made(server: &Server, expected: &[&str]) {
    until(async || made(server).await == expected).await;
}

async fn trouble(server: &Server) -> Option<DirectoriesTrouble> {
    master_of(server).await.directories.map(|troubled| troubled.trouble)
}

#[tokio::test]
async fn owners_follow_through_a_chain_that_is_cut_and_killed() {
    let data = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let mut root = Server::start(data[0].path());
    mkdir(&root, "base", "infra").await.unwrap();
    let above = Proxy::to(root.address).await;
    let mut middle = replica(data[1].path(), &above.text(), &[]);
    let below = Proxy::to(middle.address).await;
    // Whatever it follows, it has all directories.
    let only = ["--replicate-include", "base/*"];
    let mut last = replica(data[2].path(), &below.text(), &only);
    until_made(&last, &["base group infra"]).await;

    // Asked for at the end of the chain, decided on at its top, and seen where it was asked for.
    assert_eq!(mkdir(&last, "web/prod", "web").await.unwrap(), ["web", "web/prod"]);
    let expected = ["base group infra", "web nobody", "web/prod group web"];
    for server in [&root, &middle, &last] {
        assert_eq!(made(server).await, expected);
    }
    let refused = mkdir(&last, "web/prod", "web").await;
    assert_eq!(refused.unwrap(), Vec::<String>::new());
    let refused = rmdir(&last, "web").await.unwrap_err();
    assert_eq!(refused.code, FaultCode::Held);
    let says = format!("(says {}, the master of this replica)", below.address);
    assert!(refused.message.ends_with(&says), "{}", refused.message);
    assert!(last.get("/directories", "").text().contains("web/prod"));

    // Cut off, a change is refused; what was changed above meanwhile comes later.
    below.cut();
    chown(&middle, "web", "infra").await.unwrap();
    assert_eq!(made(&root).await[1], "web group infra");
    let refused = chown(&last, "web", "web").await.unwrap_err();
    assert_eq!(refused.code, FaultCode::Unavailable);
    last.kill();
    rmdir(&root, "web/prod").await.unwrap();
    last = replica(data[2].path(), &below.text(), &only);
    assert_eq!(made(&last).await, expected);
    below.mark_repaired(middle.address).await;
    until_made(&last, &["base group infra", "web group infra"]).await;

    // More than a page of them, while servers are killed.
    let deep: Vec<String> =
        (0..120).map(|number| format!("deep/{number:03}/{}", "x/".repeat(9) + "x")).collect();
    for (index, name) in deep.iter().enumerate() {
        mkdir(&root, name, "deep").await.unwrap();
        match index {
            40 => {
                middle.kill();
                middle = replica(data[1].path(), &above.text(), &[]);
                below.mark_repaired(middle.address).await;
            }
            70 => {
                above.cut();
                last.kill();
                last = replica(data[2].path(), &below.text(), &only);
            }
            90 => above.mark_repaired(root.address).await,
            _ => {}
        }
    }
    let all = made(&root).await;
    assert_eq!(all.len(), 2 + 1 + 120 * 11);
    root.kill();
    root = Server::start(data[0].path());
    above.mark_repaired(root.address).await;
    for server in [&middle, &last] {
        until(async || made(server).await == all).await;
        until_level(server).await;
        assert_eq!(trouble(server).await, None);
        assert_eq!(server.metric("dominator_replication_directories_troubled"), "0");
    }
    for server in [root, middle, last] {
        server.stop().await;
    }
    data.iter().for_each(|data| expect_clean(data.path()));
}

#[tokio::test]
async fn a_master_that_lost_its_directories_or_began_anew_takes_none_away() {
    let data = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let root = Server::start(data[0].path());
    mkdir(&root, "web", "web").await.unwrap();
    let old = replica(data[1].path(), &address(&root), &[]);
    until_made(&old, &["web group web"]).await;
    // What is empty because it was emptied is taken too.
    rmdir(&root, "web").await.unwrap();
    until_made(&old, &[]).await;
    mkdir(&root, "web", "infra").await.unwrap();
    until_made(&old, &["web group infra"]).await;
    old.stop().await;
    root.stop().await;

    let fresh = Server::start(data[2].path());
    let old = replica(data[1].path(), &address(&fresh), &[]);
    until_level(&old).await;
    assert_eq!(trouble(&old).await, Some(DirectoriesTrouble::OnlyHere));
    mkdir(&fresh, "base", "infra").await.unwrap();
    until(async || trouble(&old).await == Some(DirectoriesTrouble::Conflict)).await;
    assert_eq!(made(&old).await, ["web group infra"]);
    assert_eq!(old.metric("dominator_replication_directories_troubled"), "1");
    assert!(old.get("/", "").text().contains("began apart from those that are here"));
    old.stop().await;

    // As the text says: if those of the master are right.
    let away = tempfile::tempdir().unwrap();
    let kept = data[1].path().join("directories");
    std::fs::copy(&kept, away.path().join("directories")).unwrap();
    std::fs::remove_file(&kept).unwrap();
    let old = replica(data[1].path(), &address(&fresh), &[]);
    until_made(&old, &["base group infra"]).await;
    assert_eq!(trouble(&old).await, None);
}
