//! Checks that every relative link of README, CHANGELOG and docs leads to a file, and every anchor to a heading.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

/// Checks all Markdown files of the repository.
pub fn check(root: &Path) -> anyhow::Result<()> {
    let mut files: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(root)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "md") {
            files.push(path);
        }
    }
    for folder in ["docs", "tests", "deploy"] {
        collect(&root.join(folder), &mut files)?;
    }
    let mut broken = Vec::new();
    for file in &files {
        let text = fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
        for link in links(&text) {
            if let Err(why) = resolve(file, &link) {
                broken.push(format!(
                    "{}: `{link}` {why}",
                    file.strip_prefix(root).unwrap_or(file).display()
                ));
            }
        }
    }
    if broken.is_empty() {
        crate::step::say(&format!("{} Markdown files, every link leads somewhere", files.len()));
        return Ok(());
    }
    bail!("broken links:\n  {}", broken.join("\n  "))
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    if !folder.is_dir() {
        return Ok(());
    }
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() && path.file_name().is_none_or(|n| n != "target" && n != "node_modules") {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|e| e == "md") {
            files.push(path);
        }
    }
    Ok(())
}

/// The targets of inline links outside code.
fn links(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut fenced = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        if fenced {
            continue;
        }
        for (i, part) in line.split('`').enumerate() {
            if i % 2 == 1 {
                continue;
            }
            let mut rest = part;
            while let Some(at) = rest.find("](") {
                rest = &rest[at + 2..];
                if let Some(end) = rest.find(')') {
                    found.push(rest[..end].trim().to_owned());
                }
            }
        }
    }
    found
}

fn resolve(from: &Path, link: &str) -> Result<(), String> {
    if link.contains("://") || link.starts_with("mailto:") {
        return Ok(());
    }
    let (path, anchor) = link.split_once('#').map_or((link, None), |(p, a)| (p, Some(a)));
    let target = if path.is_empty() {
        from.to_path_buf()
    } else {
        from.parent().unwrap_or(from).join(path)
    };
    if !target.exists() {
        return Err("leads to no file".into());
    }
    let Some(anchor) = anchor.filter(|_| target.extension().is_some_and(|e| e == "md")) else {
        return Ok(());
    };
    let text = fs::read_to_string(&target).map_err(|e| e.to_string())?;
    let anchors: BTreeSet<String> = text.lines().filter(|l| l.starts_with('#')).map(slug).collect();
    if anchors.contains(anchor) {
        Ok(())
    } else {
        Err("leads to no heading".into())
    }
}

/// The anchor that Markdown viewers give a heading.
fn slug(heading: &str) -> String {
    heading
        .trim_start_matches('#')
        .trim()
        .to_lowercase()
        .chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}
