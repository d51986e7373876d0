// The few ways in which this page touches the document. Text goes in as text: there is no HTML from data anywhere.

/** The element with this id; it is in index.html. */
export function byId(id) {
  return document.getElementById(id);
}

/** A new element with attributes and children (elements or text). */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value != null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** Sets the text when it differs: what is equal costs no layout. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Sets an attribute when it differs; null removes it. */
export function setAttribute(element, name, value) {
  if (value == null) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) {
    element.setAttribute(name, value);
  }
}

export function setHidden(element, hidden) {
  if (element.hidden !== hidden) element.hidden = hidden;
}

/** Makes the children of `parent` as many as `items`, and fills each; elements are kept, so focus and hover stay. */
export function fillList(parent, items, create, fill) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  items.forEach((item, index) => {
    let child = parent.children[index];
    if (!child) {
      child = create();
      parent.append(child);
    }
    fill(child, item);
  });
}
