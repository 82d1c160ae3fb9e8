//! Trains the embedded tokenizer from a corpus generated here, and writes it into `assets/`.
//!
//! `cargo run --release -p cairn-tokens --example train_embedded -- crates/tokens/assets/tokenizer.json`. The
//! corpus is made by a seeded generator out of the word lists below, so the file is the same on every machine.

use tokenizers::decoders::byte_level::ByteLevel as ByteLevelDecoder;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, SplitDelimiterBehavior, TokenizerBuilder};

const VOCABULARY: usize = 4096;
const LINES: usize = 60_000;
const PATTERN: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SPECIAL: [&str; 10] = [
    "<|endoftext|>",
    "<|startoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
];

const FUNCTION: &str = "the a an this that these those my your his her its our their some any each every no all both \
    of in to for on with at by from about into over after under between through during before without against \
    and or but if when while because although since until unless though so than as";
const VERBS: &str = "be have do say get make go know take see come think look want give use find tell ask work seem \
    feel try leave call need become mean keep let begin help show hear play run move like live believe hold bring \
    happen write provide sit stand lose pay meet include continue set learn change lead understand watch follow stop \
    create speak read allow add spend grow open walk win offer remember love consider appear buy wait serve die send \
    expect build stay fall cut reach kill remain suggest raise pass sell require report decide pull return explain \
    hope develop carry break receive agree support hit produce eat cover catch draw choose cause point listen plan \
    notice measure compute store copy route cache match fetch load share balance restart replay retry drain answer";
const NOUNS: &str = "time year people way day man thing woman life child world school state family student group \
    country problem hand part place case week company system program question work government number night point \
    home water room mother area money story fact month lot right study book eye job word business issue side kind \
    head house service friend father power hour game line end member law car city community name president team \
    minute idea kid body information back parent face others level office door health person art war history party \
    result change morning reason research girl guy moment air teacher force education foot boy age policy music \
    market sense nation plan college interest death experience effect use class control field development role \
    effort rate heart drug show leader light voice wife police mind price report decision son view relationship town \
    road arm difference value building action season society tax director position player record paper space ground \
    form event official matter center couple site project activity star table need court oil situation cost industry \
    figure street image phone data picture practice piece land product doctor wall patient worker news test movie \
    north love support technology step baby computer type attention film tree source organization hair look network \
    engine token block prefix prompt model request answer server router index agent cluster memory storage message \
    string function variable library language compiler example document weather river mountain garden kitchen window";
const ADJECTIVES: &str = "good new first last long great little own other old right big high different small large next \
    early young important few public bad same able free sure clear full special easy strong possible whole ready \
    simple left late general human local certain open red difficult available likely short single medical current \
    wrong private past foreign fine common poor natural significant similar hot dead central happy serious recent \
    green blue black white cold warm quick slow bright dark deep wide narrow heavy light quiet loud empty busy";
const SYLLABLES: &str = "al an ar as at ba be bi bo bra ca ce ch cl co con cu da de di dis do dr du e ef el em en er es \
    et ex fa fe fi fo for fu ga ge gi go gra ha he hi ho hu i ic il im in ing ion ir is it iv ja jo ka ke ki la le li \
    lo lu ly ma me ment mi mo mu na ne ness ni no nu o ob of on op or ou pa pe per pi po pr pre pro pu qu ra re ri ro \
    ru sa sc se sh si so sp st str su ta te ter th ti tion to tr tu ty u un ur us ut va ve ver vi vo wa we wi wo y za";
const SNIPPETS: [&str; 12] = [
    "fn main() {\n    let values = vec![1, 2, 3];\n    println!(\"{:?}\", values);\n}",
    "def add(a, b):\n    \"\"\"Return the sum.\"\"\"\n    return a + b\n",
    "{\"name\": \"get_weather\", \"parameters\": {\"type\": \"object\", \"properties\": {\"city\": {\"type\": \"string\"}}}}",
    "for (int i = 0; i < n; i++) {\n\tsum += data[i];\n}",
    "SELECT id, name FROM users WHERE age >= 18 ORDER BY name LIMIT 10;",
    "<div class=\"row\">\n  <a href=\"/index.html\">Home</a>\n</div>",
    "import os\nimport sys\nfrom typing import List, Optional\n",
    "You are a helpful assistant. Answer the user's question briefly and clearly.",
    "## Tools\n\nYou may call one or more functions to assist with the user query.\n",
    "- first item\n- second item\n  - nested item\n1. one\n2. two\n",
    "https://example.org/path/to/page?query=value&other=1#part",
    "error: expected one of `;` or `}`, found `else`\n  --> src/lib.rs:12:5\n",
];

/// A small seeded generator (SplitMix64).
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % sides as u64) as usize
    }

    /// Common words come first in the lists; the square leans towards them.
    fn pick<'a>(&mut self, words: &[&'a str]) -> &'a str {
        let at = self.roll(words.len()) * self.roll(words.len()) / words.len();
        words[at]
    }
}

fn sentence(dice: &mut Dice, lists: &[Vec<&str>; 5]) -> String {
    let [function, verbs, nouns, adjectives, syllables] = lists;
    let mut out = String::new();
    for n in 0..4 + dice.roll(14) {
        let mut word = match dice.roll(10) {
            0..=2 => dice.pick(function).to_owned(),
            3 | 4 => dice.pick(nouns).to_owned() + ["", "", "s", "'s"][dice.roll(4)],
            5 | 6 => dice.pick(verbs).to_owned() + ["", "s", "ed", "ing", "er"][dice.roll(5)],
            7 => dice.pick(adjectives).to_owned() + ["", "", "ly", "er", "est"][dice.roll(5)],
            8 => (0..2 + dice.roll(3)).map(|_| dice.pick(syllables)).collect(),
            _ => match dice.roll(4) {
                0 => dice.roll(3000).to_string(),
                1 => format!("{}.{}", dice.roll(100), dice.roll(100)),
                _ => dice.pick(nouns).to_owned(),
            },
        };
        if n == 0 || dice.roll(20) == 0 {
            word = word[..1].to_uppercase() + &word[1..];
        }
        if n > 0 {
            out.push(' ');
        }
        out += &word;
        if dice.roll(12) == 0 {
            out += [",", ";", ":", " -", " (", ")"][dice.roll(6)];
        }
    }
    out + [".", ".", ".", "?", "!", ".\n", ".\n\n"][dice.roll(7)]
}

fn main() -> anyhow::Result<()> {
    let out = std::env::args()
        .nth(1)
        .ok_or_else(|| anyhow::anyhow!("usage: train_embedded OUT"))?;
    let lists = [FUNCTION, VERBS, NOUNS, ADJECTIVES, SYLLABLES].map(|list| list.split_whitespace().collect::<Vec<_>>());
    let mut dice = Dice(20_260_301);
    let corpus: Vec<String> = (0..LINES)
        .map(|n| match n % 10 {
            9 => format!(
                "{}\n{}",
                SNIPPETS[dice.roll(SNIPPETS.len())],
                sentence(&mut dice, &lists)
            ),
            _ => sentence(&mut dice, &lists) + " " + &sentence(&mut dice, &lists),
        })
        .collect();
    let failed = |e: Box<dyn std::error::Error + Send + Sync>| anyhow::anyhow!(e);
    let split = Split::new(
        SplitPattern::Regex(PATTERN.to_owned()),
        SplitDelimiterBehavior::Isolated,
        false,
    )
    .map_err(failed)?;
    let bytes = ByteLevel::new(false, true, false);
    let template = TemplateProcessing::builder()
        .try_single("<|startoftext|> $A")
        .map_err(|e| anyhow::anyhow!(e))?
        .try_pair("<|startoftext|> $A $B:1")
        .map_err(|e| anyhow::anyhow!(e))?
        .special_tokens(vec![("<|startoftext|>".to_owned(), 1)])
        .build()?;
    let mut tokenizer =
        TokenizerBuilder::<BPE, tokenizers::NormalizerWrapper, Sequence, TemplateProcessing, ByteLevelDecoder>::new()
            .with_model(BPE::default())
            .with_pre_tokenizer(Some(Sequence::new(vec![split.into(), bytes.into()])))
            .with_post_processor(Some(template))
            .with_decoder(Some(ByteLevelDecoder::default()))
            .build()
            .map_err(failed)?;
    let mut trainer = BpeTrainer::builder()
        .vocab_size(VOCABULARY)
        .min_frequency(2)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(SPECIAL.iter().map(|s| AddedToken::from(*s, true)).collect())
        .build();
    tokenizer
        .train(&mut trainer, corpus.iter().map(String::as_str))
        .map_err(failed)?;
    tokenizer.save(&out, true).map_err(failed)?;
    let size = tokenizer.get_vocab_size(true);
    anyhow::ensure!(size == VOCABULARY, "the corpus gave only {size} entries");
    Ok(())
}
